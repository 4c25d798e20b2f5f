"""The operators by themselves: bytes, waits, tickets, errors, forks, host memory.  A gate holds the copies of an engine back."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from compile_remat._torch.offload import offload_ops, streams
from compile_remat._torch.offload.host_memory import MAPPED
from compile_remat._torch.offload.streams import Direction, ThreadEvent, ThreadStreams, streams_of, streams_replaced
from tests.threads import run_at_once

CPU = torch.device("cpu")
OPS = torch.ops.compile_remat
LAYOUTS = {
    "contiguous": lambda: torch.randn(37, 64),
    "transposed": lambda: torch.randn(37, 64).t(),
    "channels last": lambda: torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 64).expand(9, 64),
    "padded rows": lambda: torch.randn(16, 40)[:, :33],
    "from an offset": lambda: torch.randn(100)[13:],
    "half": lambda: torch.randn(129).bfloat16(),
    "flags": lambda: torch.randn(50) > 0,
    "complex": lambda: torch.randn(20, dtype=torch.complex64),
    "one element": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}


class Gate:
    """Streams of the CPU whose copies in one direction wait until the gate is opened."""

    def __init__(self, direction: Direction) -> None:
        self.streams, self.opened = ThreadStreams(), threading.Event()
        self.streams.engine(CPU, direction).before_copy = self.wait

    def wait(self) -> None:
        assert self.opened.wait(60)

    def open_later(self) -> None:
        threading.Timer(0.05, self.opened.set).start()


@pytest.fixture(autouse=True)
def every_block_returns() -> Iterator[None]:
    """No transfer and no host memory is left behind by a test."""
    gc.collect()
    before = len(offload_ops._transfers), MAPPED.live_bytes
    yield
    gc.collect()
    streams_of(CPU).drain()  # type: ignore[attr-defined]
    assert (len(offload_ops._transfers), MAPPED.live_bytes) == before


def brought_back(host: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    made, arrival = OPS.fetch(host, ticket, CPU)
    return OPS.arrive(made, host, arrival)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_comes_back_as_it_left(name: str) -> None:
    given = LAYOUTS[name]()
    host, ticket = OPS.stash(given)
    OPS.release(given, ticket)
    assert (host.dtype, host.size(), host.stride()) == (given.dtype, given.size(), given.stride())
    assert host.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    made = brought_back(host, ticket)
    assert made.stride() == given.stride() and torch.equal(made, given)


def test_a_release_waits_for_the_copy_to_the_host() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        host, ticket = OPS.stash(given)
        gate.open_later()
        OPS.release(given, ticket)
        assert gate.opened.is_set()
        kept = given.clone()
        given.fill_(7.0)  # as the kernel does to which the memory is handed on
    assert torch.equal(host, kept)


def test_without_a_release_the_host_gets_other_numbers() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        host, ticket = OPS.stash(given)
        given.fill_(7.0)
        gate.opened.set()
        OPS.release(given, ticket)
    assert host.unique().item() == 7.0


def test_an_arrival_waits_for_the_copy_from_the_host() -> None:
    gate, given = Gate(Direction.BACK), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        host, ticket = OPS.stash(given)
        OPS.release(given, ticket)
        made, arrival = OPS.fetch(host, ticket, CPU)
        made.fill_(7.0)
        assert made.unique().item() == 7.0  # a kernel that does not wait reads this
        gate.open_later()
        assert torch.equal(OPS.arrive(made, host, arrival), given)


def test_a_fetch_waits_for_the_copy_to_the_host() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        host, ticket = OPS.stash(given)
        made, arrival = OPS.fetch(host, ticket, CPU)
        gate.open_later()
        assert torch.equal(OPS.arrive(made, host, arrival), given)
        assert gate.opened.is_set()


def test_copies_wait_for_nothing_before_they_are_asked_to() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        _, ticket = OPS.stash(given)
        assert not gate.opened.is_set()
        gate.opened.set()
        OPS.release(given, ticket)


def test_two_forwards_before_two_backwards_in_either_order() -> None:
    first, second = torch.randn(100), torch.randn(100)
    left = [(given, *OPS.stash(given)) for given in (first, second)]
    for given, _, ticket in left:
        OPS.release(given, ticket)
    for given, host, ticket in (*left, *reversed(left)):  # and each backward a second time
        assert torch.equal(brought_back(host, ticket), given)


def test_an_unfinished_transfer_keeps_its_memory_until_the_copy_has_ended() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(1000)
    with streams_replaced("cpu", gate.streams):
        stashed = OPS.stash(given)
        gate.open_later()
        del stashed  # as in a forward that raises before the release
        assert gate.opened.is_set()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("fails", [False, True])
def test_who_waits_for_a_copy_finds_its_memory_free(
    direction: Direction, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread holds no tensor when it says that the copy has ended, or its memory counts in a peak by chance."""
    tensors, dead = [torch.randn(100), torch.randn(100)], []
    watched = [weakref.ref(tensor) for tensor in tensors]

    def end(event: ThreadEvent) -> None:
        dead.append([ref() is None for ref in watched])
        ended(event)

    ended = ThreadEvent.end
    gate = Gate(direction)
    event = gate.streams.engine(CPU, direction).copy(*tensors, [])
    tensors.clear()
    monkeypatch.setattr(ThreadEvent, "end", end)
    if fails:
        monkeypatch.setattr(streams.ctypes, "memmove", None)
    gate.opened.set()
    if fails:
        with pytest.raises(RuntimeError, match="a copy between device and host failed"):
            event.synchronize()
    else:
        event.synchronize()
    assert dead == [[True, True]]


def test_a_ticket_of_a_copied_tensor_is_refused() -> None:
    given = torch.randn(100)
    host, ticket = OPS.stash(given)
    OPS.release(given, ticket)
    copied = ticket.clone()
    del ticket
    with pytest.raises(RuntimeError, match="ticket of an offloaded tensor was copied"):
        OPS.fetch(host, copied, CPU)


def test_hooks_of_saved_tensors_may_hand_copies_on() -> None:
    gate, given = Gate(Direction.OUT), torch.randn(100)
    with streams_replaced("cpu", gate.streams):
        gate.open_later()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            host, ticket = OPS.stash(given)
            assert gate.opened.is_set()
            OPS.release(given, ticket)
            host, ticket = host.clone(), ticket.clone()
        assert torch.equal(brought_back(host, ticket), given)


@pytest.mark.parametrize("direction", Direction)
def test_a_copy_that_fails_raises_where_its_end_is_waited_for(direction: Direction) -> None:
    def fail() -> None:
        raise ValueError("the link is down")

    streams, given = ThreadStreams(), torch.randn(100)
    streams.engine(CPU, direction).before_copy = fail
    with streams_replaced("cpu", streams):
        host, ticket = OPS.stash(given)
        with pytest.raises(RuntimeError, match="copy between device and host failed: the link is down"):
            OPS.release(given, ticket)
            brought_back(host, ticket)


def test_threads_do_not_meet() -> None:
    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            given = torch.randn(500, generator=generator)
            host, ticket = OPS.stash(given)
            OPS.release(given, ticket)
            kept = given.clone()
            given.fill_(float(seed))
            assert torch.equal(brought_back(host, ticket), kept)

    run_at_once(*(lambda seed=seed: train(seed) for seed in range(8)))  # type: ignore[misc]


def _in_a_child(given: torch.Tensor) -> bool:
    host, ticket = OPS.stash(given)
    OPS.release(given, ticket)
    return torch.equal(brought_back(host, ticket), given)


def test_a_forked_process_has_copies_of_its_own() -> None:
    assert _in_a_child(torch.randn(100))  # the threads of this process run
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_in_a_child, (torch.ones(100),)).get(timeout=60)


def test_host_blocks_serve_the_next_step() -> None:
    given = torch.randn(1 << 18)
    MAPPED.drop_free()
    for _ in range(3):
        host, ticket = OPS.stash(given)
        OPS.release(given, ticket)
        assert MAPPED.live_bytes >= given.nbytes
        del host, ticket
        gc.collect()
        streams_of(CPU).drain()  # type: ignore[attr-defined]
    assert MAPPED.free_bytes == given.nbytes


def test_the_host_copy_is_not_in_torchs_memory() -> None:
    from compile_remat._torch.allocator_events import most_allocated

    given = torch.randn(1 << 18)

    def run() -> None:
        host, ticket = OPS.stash(given)
        OPS.release(given, ticket)
        made, arrival = OPS.fetch(host, ticket, CPU)
        OPS.arrive(made, host, arrival)

    assert most_allocated(run, CPU)[0] == given.nbytes  # what is fetched
