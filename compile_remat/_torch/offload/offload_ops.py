"""Four operators that move a saved tensor to the host in the forward, and back to the device in the backward.

``stash`` starts the copy of a tensor to the host, ``release`` lets the kernels that follow wait for its end: behind it the tensor's
memory may serve other tensors.  ``fetch`` makes a new tensor on the device and starts the copy into it; ``arrive`` lets the kernels
that follow wait for the end of that copy, and returns the same tensor, which only they may read.

Each copy has a ticket: a tensor with a serial number, saved for the backward like an activation.  A ticket's memory belongs to the
`Transfer` itself, so that a transfer lives as long as the ticket: until the backward has run, or until the graph is dropped without
one.  Two forwards before a backward, a second backward and several threads therefore never meet the ticket of another copy.  A
transfer that ends unfinished, as after an exception, waits before it lets the memory go.

The host tensor has the layout of the tensor on the device.  So Inductor, which may give the tensor other strides than the graph
says, tells the backward about them as for any saved tensor.

The tags are those of `delivery.delivery_ops`; `RELEASE` and `ARRIVED` say that they write into their tensor, which keeps them
behind or before all its readers.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from contextlib import suppress
from typing import Any

import torch

from compile_remat._torch.offload.streams import Direction, Event, HostCopyError, streams_of
from compile_remat._torch.version import private_name

NAMESPACE = "compile_remat"

saved_tensor_hooks = private_name("torch._C._autograd", "_top_saved_tensors_default_hooks")

_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe", "flexible_layout") if hasattr(torch.Tag, name)]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define("stash(Tensor given) -> (Tensor host, Tensor ticket)", tags=_TAGS)
_LIBRARY.define("release(Tensor(a!) given, Tensor ticket) -> ()", tags=_TAGS)
_LIBRARY.define("fetch(Tensor host, Tensor ticket, Device device) -> (Tensor made, Tensor arrival)", tags=_TAGS)
_LIBRARY.define("arrive(Tensor(a) made, Tensor host, Tensor arrival) -> Tensor(a)", tags=_TAGS)
_LIBRARY.define("arrived(Tensor(a!) made, Tensor host, Tensor arrival) -> ()", tags=_TAGS)

STASH: Any = torch.ops.compile_remat.stash.default
RELEASE: Any = torch.ops.compile_remat.release.default
FETCH: Any = torch.ops.compile_remat.fetch.default
ARRIVE: Any = torch.ops.compile_remat.arrive.default
ARRIVED: Any = torch.ops.compile_remat.arrived.default
"""`ARRIVE` in Inductor's code: the same without a result."""


def made_in_host_memory(operator: object, result: Any) -> list[torch.Tensor]:
    """The tensors among an operator's results that take no memory of the device, nor of torch's allocator for the CPU."""
    return list(result) if operator is STASH else [result[1]] if operator is FETCH else []


ENDED = 0
"""Serial number of a copy that had ended when its ticket was made."""


class Transfer(bytearray):
    """A copy, in the memory of its ticket.

    Attributes:
        done: Ends with the copy.
        tensor: The tensor on the device, while kernels that were given have not waited for the copy; else None.
    """

    def __init__(self, done: Event, tensor: torch.Tensor) -> None:
        self.serial = next(_serials)
        super().__init__(self.serial.to_bytes(8, sys.byteorder))
        self.done = done
        self.device = tensor.device
        self.tensor: torch.Tensor | None = tensor
        _transfers[self.serial] = self

    def finish(self) -> None:
        """Let the kernels that follow wait for the copy, and let the tensor on the device go; raises HostCopyError if it failed."""
        tensor, self.tensor = self.tensor, None
        if tensor is not None:
            streams_of(self.device).current(self.device).wait(self.done)

    def ticket(self) -> torch.Tensor:
        """A tensor whose memory is this object."""
        return torch.frombuffer(self, dtype=torch.int64).reshape(())

    def __del__(self) -> None:
        with suppress(HostCopyError):  # nothing has read the copy, and nothing will
            self.finish()


_serials = itertools.count(ENDED + 1)
_transfers = weakref.WeakValueDictionary[int, Transfer]()


def _transfer(ticket: torch.Tensor) -> Transfer | None:
    """The transfer of a ticket, None if its copy had ended before.

    Raises:
        RuntimeError: The ticket's memory is gone: another tensor with the same number was handed over.
    """
    serial = int(ticket)
    if serial == ENDED:
        return None
    found = _transfers.get(serial)
    if found is None:
        raise RuntimeError(
            "compile_remat: the ticket of an offloaded tensor was copied between forward and backward, so that the end of the "
            "tensor's copy is not known. Compile the model with offload = 'off'."
        )
    return found


def _stash(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    streams = streams_of(given.device)
    host, ready = streams.empty_host(given), streams.current(given.device).record()
    transfer = Transfer(streams.engine(given.device, Direction.OUT).copy(host, given, [ready]), given)
    if saved_tensor_hooks(True) is None:
        return host, transfer.ticket()
    transfer.done.synchronize()  # hooks may read the host tensor, and pass copies on in the place of both
    transfer.tensor = None  # kernels that are called later have nothing to wait for
    return host, torch.full((), ENDED, dtype=torch.int64)


def _release(given: torch.Tensor, ticket: torch.Tensor) -> None:
    transfer = _transfer(ticket)
    if transfer is not None:
        transfer.finish()


def empty_like_host(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of the device with the layout of a host tensor."""
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


def _fetch(host: torch.Tensor, ticket: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    streams, transfer = streams_of(device), _transfer(ticket)
    made = empty_like_host(host, device)
    after = [streams.current(device).record()]  # kernels that used this memory before
    after += [transfer.done] if transfer is not None else []
    return made, Transfer(streams.engine(device, Direction.BACK).copy(made, host, after), made).ticket()


def _arrived(made: torch.Tensor, host: torch.Tensor, arrival: torch.Tensor) -> None:
    transfer = _transfer(arrival)
    if transfer is not None:
        transfer.finish()


def _arrive(made: torch.Tensor, host: torch.Tensor, arrival: torch.Tensor) -> torch.Tensor:
    _arrived(made, host, arrival)
    return made.view(made.size())


def _stash_fake(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    host = torch.empty_strided(given.size(), given.stride(), dtype=given.dtype, device="cpu")
    return host, torch.empty((), dtype=torch.int64, device="cpu")


def _fetch_fake(host: torch.Tensor, ticket: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_like_host(host, device), torch.empty((), dtype=torch.int64, device="cpu")


def _nothing_fake(*_: object) -> None:
    return None


def _arrive_fake(made: torch.Tensor, host: torch.Tensor, arrival: torch.Tensor) -> torch.Tensor:
    return made.view(made.size())


for _name, _real, _fake in (
    ("stash", _stash, _stash_fake),
    ("release", _release, _nothing_fake),
    ("fetch", _fetch, _fetch_fake),
    ("arrive", _arrive, _arrive_fake),
    ("arrived", _arrived, _nothing_fake),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)
for _operator in (RELEASE, ARRIVED):
    torch.fx.node.has_side_effect(_operator)
