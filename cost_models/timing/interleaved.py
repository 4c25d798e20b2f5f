"""Timing of many cases in interleaved rounds, so that drift of the machine (clock rates, other load) affects all cases alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat.cost_models.timing.clock import elapsed_ns
from compile_remat.cost_models.timing.microbenchmarks import Case

MIN_ROUNDS = 3

BURST_NS = 200_000
"""Target length of one measurement of a warm case, in which a short kernel runs several times."""

MAX_CALLS = 200

SUSTAINED_NS, TOY_SUSTAINED_NS = 200_000_000, 5_000_000
"""Work without a pause until a device has lowered its clock to keep within its power."""

PAUSE_S = 0.2
"""A pause after which a device may raise its clock again."""


@dataclass
class TimedCase:
    """A case with its measured times.

    Attributes:
        run: Calls the case's function on its arguments.
        calls: Number of runs in one measurement.
        times_ns: Nanoseconds of one run, one entry for each round.
    """

    case: Case
    run: Callable[[], Any]
    calls: int = 1
    times_ns: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        """Median time of one run over the rounds, in ns."""
        return statistics.median(self.times_ns)


def prepared(case: Case) -> TimedCase:
    """Draw arguments, compile if the case asks for it, run a few times, and choose the number of runs in one measurement."""
    arguments = case.arguments()
    function = torch.compile(case.function, dynamic=False) if case.compiled else case.function
    timed = TimedCase(case, lambda: function(*arguments))
    with torch.no_grad():
        timed.run()
        shortest_ns = min(elapsed_ns(timed.run, arguments[0].device) for _ in range(3))
    if not case.is_cold:
        timed.calls = min(MAX_CALLS, max(1, BURST_NS // shortest_ns))
    return timed


def run_rounds(
    cases: Sequence[TimedCase], device: torch.device, seconds: float, progress: Callable[[int, float], None]
) -> None:
    """Measure every case once a round, in rotating order, for `seconds` and at least `MIN_ROUNDS` rounds.

    `progress` is called after each round with the number of rounds and the seconds so far.
    """
    before = _long_work(device)
    start = time.perf_counter()
    rounds = 0
    with torch.no_grad():
        while rounds < MIN_ROUNDS or time.perf_counter() - start < seconds:
            first = rounds % len(cases)
            for timed in (*cases[first:], *cases[:first]):
                if not timed.case.is_cold:
                    timed.run()
                timed.times_ns.append(elapsed_ns(timed.run, device, calls=timed.calls, before=before) / timed.calls)
            rounds += 1
            progress(rounds, time.perf_counter() - start)


def clock_ratio(timed: TimedCase, device: torch.device, sustained_ns: int) -> float:
    """Time of a case in a burst over its time at the end of `sustained_ns` of work without a pause; at most 1."""
    ratios = []
    with torch.no_grad():
        for _ in range(MIN_ROUNDS):
            time.sleep(PAUSE_S)
            timed.run()  # wakes the device
            burst_ns = elapsed_ns(timed.run, device, calls=timed.calls) / timed.calls
            calls = max(1, round(sustained_ns / burst_ns))
            for _ in range(calls):
                timed.run()
            last = max(1, calls // 4)
            ratios.append(burst_ns / (elapsed_ns(timed.run, device, calls=last, before=timed.run) / last))
    return min(1.0, statistics.median(ratios))


def _long_work(device: torch.device) -> Callable[[], Any] | None:
    """Returns work of some milliseconds on a GPU, during which a burst of launches can queue up; None on a CPU."""
    if device.type != "cuda":
        return None
    a = torch.randn(4096, 4096, device=device)
    return lambda: torch.mm(a, a)
