"""Side runs: both plans of one graph run on copies of the arguments, if the memory allows, without effect on the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compile_remat._torch.ambient import read_random_state, write_random_state
from compile_remat._util.host import host_free_bytes
from compile_remat._util.units import format_bytes
from compile_remat.device import free_memory
from compile_remat.verify.no_recompute import NoRecomputePartitioner
from compile_remat.verify.observation import (
    NotComparable,
    Nudge,
    Observed,
    copy_arguments,
    observe,
    refuse_uncopyable,
)

RESULTS_KEPT = 3
"""Sets of outputs and gradients on the host at once: one of each of the two plans, and one of a measurement of rounding."""

Compiled = Callable[..., Any]


class StepFailed(Exception):
    """The plan's own step raised an error that the plan that recomputes nothing does not raise."""


@dataclass(frozen=True)
class _IsolatedCall:
    """The arguments of the user's call, and the random states before the call."""

    args: Sequence[Any]
    devices: tuple[torch.device, ...]
    random: dict[str, torch.Tensor]


class SideRuns:
    """Runs the plan (`actual`) and the plan that recomputes nothing (`expected`), only inside of `isolated`."""

    def __init__(
        self,
        compiled: Compiled,
        plain: Compiled,
        facts: NoRecomputePartitioner,
        peak_bytes: int,
    ) -> None:
        self.compiled, self.plain = compiled, plain
        self.facts, self.peak_bytes = facts, peak_bytes
        self.call: _IsolatedCall | None = None

    @contextmanager
    def isolated(self, args: Sequence[Any]) -> Iterator[None]:
        """Allow side runs on `args` in the body; afterwards restore random states and free cached memory.

        Raises:
            NotComparable: These arguments cannot be run twice, or there is not enough memory.
        """
        refuse_uncopyable(args)
        if self.facts.communicates:
            raise NotComparable("the graph communicates with other ranks, which may not compare at the same time")
        devices = devices_of(args)
        self.call = _IsolatedCall(args, devices, read_random_state(devices))
        try:
            self._require_memory()
            yield
        finally:
            write_random_state(self.call.random)
            self.call = None
            _release(devices)

    def expected(self, nudge: Nudge | None = None) -> Observed:
        """Run the plan that recomputes nothing; returns its observed tensors and random states.

        Raises:
            NotComparable: The run fails, or there is not enough memory.
        """
        call = self._begin()
        try:
            return observe(self.plain, copy_arguments(call.args, self.facts.mutated, nudge), call.devices)
        except NotComparable:
            raise
        except torch.OutOfMemoryError as error:
            raise NotComparable(f"not enough device memory ({first_line(error)})") from error
        except Exception as error:
            raise NotComparable(f"the plan that recomputes nothing fails ({first_line(error)})") from error

    def actual(self) -> Observed:
        """Run the plan; returns its observed tensors and random states.

        Raises:
            StepFailed: The run raises an error.
            NotComparable: There is not enough memory for the run beside the copies.
        """
        call = self._begin()
        try:
            return observe(self.compiled, copy_arguments(call.args, self.facts.mutated), call.devices)
        except torch.OutOfMemoryError as error:
            raise NotComparable(f"not enough device memory ({first_line(error)})") from error
        except NotComparable:
            raise
        except Exception as error:
            raise StepFailed(first_line(error)) from error

    def _begin(self) -> _IsolatedCall:
        assert self.call is not None, "a side run needs `isolated` around it"
        _release(self.call.devices)
        write_random_state(self.call.random)
        return self.call

    def _require_memory(self) -> None:
        """Raise NotComparable unless all saved values, the plan's peak and copies of all arguments fit into memory together."""
        assert self.call is not None
        argument_bytes = sum(a.nbytes for a in self.call.args if isinstance(a, torch.Tensor))
        needed_bytes = self.facts.saved_bytes + self.peak_bytes + argument_bytes
        require_memory(needed_bytes, RESULTS_KEPT * argument_bytes, self.call.devices)


def require_memory(needed_bytes: int, results_bytes: int, devices: Sequence[torch.device]) -> None:
    """Raise if a side run would not fit: `needed_bytes` on each device (on the host if there is none), `results_bytes` on the host.

    A host without memory swaps or kills the process, so this check precedes every allocation.

    Raises:
        NotComparable: There is not enough memory; the text names the free bytes.
    """
    host_bytes = results_bytes if devices else needed_bytes + results_bytes
    places = [("host", host_bytes, host_free_bytes())]
    places += [("device", needed_bytes, free_memory.free_bytes(device)) for device in devices]
    for kind, asked_bytes, free_bytes in places:
        if free_bytes is not None and asked_bytes > free_bytes:
            have = f"it takes {format_bytes(asked_bytes)}, and {format_bytes(free_bytes)} is free"
            raise NotComparable(f"not enough {kind} memory: {have}")


def devices_of(args: Sequence[Any]) -> tuple[torch.device, ...]:
    """Returns the accelerators that hold the arguments."""
    return tuple(dict.fromkeys(a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"))


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error, for a message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _release(devices: Sequence[torch.device]) -> None:
    """Empty the allocators' caches, so that a side run does not leave the next step with less free memory."""
    for device in devices:
        torch.get_device_module(device).empty_cache()
