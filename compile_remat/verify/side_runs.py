"""The two plans of one graph, each run on the side: where there is memory for it, and leaving no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compile_remat._torch.random_state import read_random_state, write_random_state
from compile_remat._util.units import format_bytes
from compile_remat.device import free_memory
from compile_remat.verify.no_recompute import ReferencePartitioner
from compile_remat.verify.observation import (
    RANDOM,
    NotComparable,
    Nudge,
    Observed,
    copy_arguments,
    observe,
    refuse_odd,
)

EPSILON_ELSEWHERE = 2.0**-10
"""Spacing of TF32, which a GPU may use where the CPU has float32."""

RESULTS_KEPT = 3
"""Sets of outputs and gradients on the host at once: of either plan, and of a measurement of rounding."""

Compiled = Callable[..., Any]


class StepFailed(Exception):
    """The plan's own step raised an error that the plan that recomputes nothing does not raise."""


@dataclass(frozen=True)
class _Call:
    """The call that is tried, and how things stood before it."""

    args: Sequence[Any]
    devices: tuple[torch.device, ...]
    random: dict[str, torch.Tensor]


class Trials:
    """Runs of the plan (`actual`) and of the plan that recomputes nothing (`expected`) inside `on_the_side`."""

    def __init__(
        self,
        compiled: Compiled,
        plain: Compiled,
        on_host: Compiled | None,
        facts: ReferencePartitioner,
        peak_bytes: int,
    ) -> None:
        self.compiled, self.plain, self.on_host = compiled, plain, on_host
        self.facts, self.peak_bytes = facts, peak_bytes
        self.is_here = True
        self.call: _Call | None = None

    @property
    def epsilon(self) -> float:
        """Spacing of the coarsest numbers that occur in either computation."""
        return self.facts.epsilon if self.is_here else max(self.facts.epsilon, EPSILON_ELSEWHERE)

    @contextmanager
    def on_the_side(self, args: Sequence[Any]) -> Iterator[None]:
        """Choose where to run; whatever happens inside, random state and memory are as before.

        Raises:
            NotComparable: There is no way to run these arguments twice.
        """
        refuse_odd(args)
        if self.facts.communicates:
            raise NotComparable("the graph communicates with other ranks, which may not compare at the same time")
        devices = devices_of(args)
        self.call = _Call(args, devices, read_random_state(devices))
        try:
            self.is_here = self._fits_here()
            yield
        finally:
            write_random_state(self.call.random)
            self.call = None
            _release(devices)

    def expected(self, nudge: Nudge | None = None) -> Observed:
        """What the plan that recomputes nothing does; on the host where the device has no memory for it.

        Raises:
            NotComparable: It fails, or there is no memory for it anywhere.
        """
        try:
            return self._expected_here(nudge) if self.is_here else self._expected_on_host(nudge)
        except NotComparable:
            raise
        except torch.OutOfMemoryError as error:
            if self.is_here and self.on_host is not None and nudge is None:
                self.is_here = False
            else:
                raise NotComparable(f"not enough memory ({first_line(error)})") from error
        except Exception as error:
            raise NotComparable(f"the plan that recomputes nothing fails ({first_line(error)})") from error
        return self.expected(nudge)

    def actual(self) -> Observed:
        """What the plan does.

        Raises:
            StepFailed: It raises an error.
            NotComparable: There is no memory for it beside the copies, or it drew numbers that the host cannot draw.
        """
        call = self._begin()
        try:
            seen = observe(self.compiled, copy_arguments(call.args, self.facts.mutated), call.devices)
        except torch.OutOfMemoryError as error:
            raise NotComparable(f"not enough memory ({first_line(error)})") from error
        except NotComparable:
            raise
        except Exception as error:
            raise StepFailed(first_line(error)) from error
        if not self.is_here and any(not torch.equal(seen[RANDOM, place], old) for place, old in call.random.items()):
            raise NotComparable("it draws random numbers, and the memory for a comparison on their device is missing")
        return seen

    # -- where --------------------------------------------------------------------------------------------------------

    def _expected_here(self, nudge: Nudge | None) -> Observed:
        call = self._begin()
        return observe(self.plain, copy_arguments(call.args, self.facts.mutated, nudge=nudge), call.devices)

    def _expected_on_host(self, nudge: Nudge | None) -> Observed:
        call = self._begin()
        needed, free = self._needed_bytes() + self._results_bytes(), free_memory.host_free_bytes()
        if self.on_host is None or (free is not None and needed > free):
            raise NotComparable(_shortage(needed, free))
        copies = copy_arguments(call.args, None, nudge=nudge, device=torch.device("cpu"))
        return observe(self.on_host, copies, call.devices)

    def _begin(self) -> _Call:
        assert self.call is not None, "a trial belongs inside on_the_side"
        _release(self.call.devices)
        write_random_state(self.call.random)
        return self.call

    def _fits_here(self) -> bool:
        """Whether the device has the memory; a host that has not is the end, as it would swap or kill the process."""
        assert self.call is not None
        needed, free = self._needed_bytes(), free_memory.host_free_bytes()
        if not self.call.devices:
            needed += self._results_bytes()
            if free is not None and needed > free:
                raise NotComparable(_shortage(needed, free))
            return True
        frees = [free_memory.free_bytes(d) for d in self.call.devices]
        return all(f is None or needed <= f for f in frees)

    def _needed_bytes(self) -> int:
        """All saved at once, the plan's temporaries and gradients, and copies of all arguments."""
        assert self.call is not None
        tensors = [a for a in self.call.args if isinstance(a, torch.Tensor)]
        return self.facts.saved_bytes + self.peak_bytes + sum(t.nbytes for t in tensors)

    def _results_bytes(self) -> int:
        assert self.call is not None
        tensors = [a for a in self.call.args if isinstance(a, torch.Tensor)]
        return RESULTS_KEPT * sum(t.nbytes for t in tensors)


def devices_of(args: Sequence[Any]) -> tuple[torch.device, ...]:
    """The accelerators that the arguments are on."""
    return tuple(dict.fromkeys(a.device for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"))


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a text that mentions it."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _shortage(needed: int, free: int | None) -> str:
    have = "an unknown amount" if free is None else format_bytes(free)
    return f"it takes {format_bytes(needed)} of memory, and {have} is free"


def _release(devices: Sequence[torch.device]) -> None:
    """Give back what the allocators keep: a trial must not make the next step look short of memory."""
    for device in devices:
        torch.get_device_module(device).empty_cache()
