"""The fastest of all plans of a chain with all sets of copies, on the clock of the planner, by branch and bound.

A chain whose layers are kept, recomputed, or sent to the host is the problem of POFO (Beaumont, Eyraud-Dubois and Shilova,
"Efficient combination of rematerialization and offloading for training DNNs", NeurIPS 2021).  Here all choices are tried on the
planner's own clock, in which kernels wait for whole copies, but for those that are proven to be slower, or to exceed the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from compile_remat.passes import Link, Planner, Problem
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.search.offload.copies import large_enough
from compile_remat.passes.search.offload.transfers import transfers_of


def fastest_below_ns(problem: Problem, link: Link, budget_bytes: int, limit_ns: int) -> int:
    """Extra time of the fastest plan within the budget, whatever it moves; `limit_ns` if no plan is faster than that."""
    planner, best = Planner(problem), limit_ns
    free = [v for v, value in enumerate(problem.values) if value.is_saveable]
    for mask, kept_ns in _by_time(planner.simulator, free, planner.fastest_time_ns):
        if kept_ns >= best:
            break
        curve = planner.curve(mask)
        for moved, least_ns in _sets(curve, link, budget_bytes, best - kept_ns):
            if kept_ns + least_ns < best:
                made = transfers_of(curve, moved, link, budget_bytes)
                if made.peak_bytes <= budget_bytes:
                    best = min(best, kept_ns + made.stall_ns)
    return best


def _by_time(simulator: Simulator, free: list[int], fastest_ns: int) -> Iterator[tuple[np.ndarray, int]]:
    """All saved sets with their extra time, the fastest first."""
    count = 1 << len(free)
    masks = np.zeros((simulator.num_values, count), dtype=bool)
    for k, v in enumerate(free):
        masks[v] = (np.arange(count) >> k) & 1
    times = simulator.costs(masks)[0]
    for k in np.argsort(times, kind="stable").tolist():
        yield masks[:, k], int(times[k]) - fastest_ns


def _sets(curve: StepCurve, link: Link, budget_bytes: int, below_ns: int) -> Iterator[tuple[tuple[Movable, ...], int]]:
    """Sets of buffers that may keep the budget, with the least time of their copies, which is below `below_ns`.

    Between forward and backward all of them are away, and by then the link has been busy for the time of all copies.
    """
    buffers, end_ns = large_enough(curve), int(curve.forward_starts_ns[-1])
    for size in range(len(buffers) + 1):
        for moved in itertools.combinations(buffers, size):
            nbytes = sum(each.nbytes for each in moved)
            out_ns = sum(link.out_ns(each.nbytes) for each in moved)
            back_ns = sum(link.back_ns(each.nbytes) for each in moved)
            least_ns = max(0, out_ns - end_ns) + round(link.slowed_part * (out_ns + back_ns))
            if curve.forward_live[-1] - nbytes <= budget_bytes and least_ns < below_ns:
                yield moved, least_ns
