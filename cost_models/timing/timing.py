"""How long kernels take: interleaved turns, medians, on CPU by the clock and on CUDA by events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_remat.cost_models.timing.cuda_events import elapsed_ns
from compile_remat.cost_models.timing.microbenchmarks import Case

LEAST_ROUNDS = 3
BURST_NS = 200_000
"""About how long one turn of a kernel that is not cold takes: many calls of a short one, so that the clock is fine enough."""

MOST_CALLS = 200


@dataclass
class Turns:
    """A case that takes turns with others.

    Attributes:
        calls: How often it runs in one turn.
        times_ns: What one kernel took in each turn.
    """

    case: Case
    run: Callable[[], Any]
    calls: int = 1
    times_ns: list[float] = field(default_factory=list)

    @property
    def median_ns(self) -> float:
        """Median over the turns."""
        return statistics.median(self.times_ns)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a fraction of the median."""
        if len(self.times_ns) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.times_ns, n=4)
        return (high - low) / self.median_ns


def prepare(case: Case) -> Turns:
    """Draw arguments, compile where asked, and run it a few times."""
    arguments = case.arguments()
    function = torch.compile(case.function, dynamic=False) if case.compiled else case.function
    turns = Turns(case, lambda: function(*arguments))
    with torch.no_grad():
        turns.run()
        device = arguments[0].device
        shortest = min(_once(turns.run, device) for _ in range(3))
    if not case.is_cold:
        turns.calls = int(min(MOST_CALLS, max(1, BURST_NS // max(1, shortest))))
    return turns


def take_turns(
    turns: Sequence[Turns], device: torch.device, seconds: float, progress: Callable[[int, float], None]
) -> None:
    """Let all of them run again and again for so long, in another order each round; at least `LEAST_ROUNDS` rounds.

    The next turn of a case comes after all others, so what drifts (clock rates, other load) strikes all of them alike.
    `progress` gets the round and the seconds that it all took so far.
    """
    plug = _plug(device)
    start = time.perf_counter()
    count = 0
    with torch.no_grad():
        while count < LEAST_ROUNDS or time.perf_counter() - start < seconds:
            first = count % len(turns)
            for turn in (*turns[first:], *turns[:first]):
                turn.times_ns.append(_turn(turn, device, plug))
            count += 1
            progress(count, time.perf_counter() - start)


def clock_name(device: torch.device) -> str:
    """How `take_turns` measures on this device, in words."""
    if device.type != "cpu":
        return "CUDA events"
    return "processor time of the process, one thread" if torch.get_num_threads() == 1 else "wall clock"


def cpu_clock() -> Callable[[], int]:
    """With one thread the processor time of the process, which other load on the machine does not lengthen."""
    return time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns


def _turn(turn: Turns, device: torch.device, plug: Callable[[], Any]) -> float:
    if not turn.case.is_cold:
        turn.run()
    if device.type == "cuda":
        return _by_events(turn.run, turn.calls, device, plug) / turn.calls
    clock = cpu_clock()
    start = clock()
    for _ in range(turn.calls):
        turn.run()
    return max(1, clock() - start) / turn.calls


def _by_events(run: Callable[[], Any], calls: int, device: torch.device, plug: Callable[[], Any]) -> float:
    def burst() -> None:
        for _ in range(calls):
            run()

    torch.cuda.synchronize(device)
    return max(1.0, float(elapsed_ns(burst, device, plug)))


def _plug(device: torch.device) -> Callable[[], Any]:
    """Something long for the device to do; nothing on CPU."""
    if device.type != "cuda":
        return lambda: None
    a = torch.randn(4096, 4096, device=device)
    return lambda: torch.mm(a, a)


def _once(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - start
