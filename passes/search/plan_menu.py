"""Plans of one graph to choose from if several graphs share a budget.

A graph that runs alone needs its peak.  A graph that runs beside others also takes memory while these run: its saved tensors and
outputs stay alive from the end of its forward to its backward.  So a plan has several sizes here, and no plan is left out that is
best for some mixture of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.problem.facts import PlainFacts
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.tags import LIKE_TORCH, obeying
from compile_remat.passes.search.solver import Planner


@dataclass(frozen=True)
class PlanOption:
    """Memory and time of one plan, for its own graph and for the graphs that run in between.

    Attributes:
        saved: Names of the saved values.
        held_bytes: Bytes held between the graph's forward and backward: saved values, outputs, and copies of inputs.
        forward_peak_bytes: The most bytes live at once in the forward.
        peak_bytes: The most bytes live at once in forward and backward.
        time_ns: Estimated time beyond the fastest plan.
        kept_output_bytes: Bytes of the outputs that the graph's own backward reads.  These outputs are alive beside the incoming
            gradients; the graphs that read the other outputs have freed them by then.
    """

    saved: tuple[str, ...]
    held_bytes: int
    forward_peak_bytes: int
    peak_bytes: int
    time_ns: int
    kept_output_bytes: int = 0


def plan_options(planner: Planner) -> tuple[PlanOption, ...]:
    """Plans of which none beats another in time and every size, fastest first."""
    lowest, fastest = planner.lowest(once=True), planner.fastest()
    span = fastest.peak_bytes - lowest.peak_bytes
    budgets = [lowest.peak_bytes + int(span * share) for share in planner.options.menu_targets]
    plans = [lowest, fastest, *(planner.within(b, once=True) for b in budgets)]
    masks = [*planner.search.levels, *(planner.mask_of(plan.saved) for plan in plans)]
    found = {
        option.saved: option
        for option in _described(planner.simulator, np.stack(masks, axis=1), planner.fastest_time_ns)
    }
    ordered = sorted(found.values(), key=lambda o: (o.time_ns, *_sizes(o), o.saved))
    kept: list[PlanOption] = []
    for option in ordered:
        if not any(all(a <= b for a, b in zip(_sizes(k), _sizes(option), strict=True)) for k in kept):
            kept.append(option)
    return tuple(kept)


def option_of(planner: Planner, plan: Plan) -> PlanOption:
    """Memory and time of a plan whose graph runs beside others."""
    mask = planner.mask_of(plan.saved)[:, None]
    (option,) = _described(planner.simulator, mask, planner.fastest_time_ns)
    return option


def backward_peak_bytes(planner: Planner, plan: Plan) -> int:
    """The most bytes live at once in a plan's backward, saved values and outputs included."""
    return int(planner.simulator.one(planner.mask_of(plan.saved)).backward_peak[0])


def plain_option(problem: Problem, observed: PlainFacts | None = None) -> PlanOption:
    """Memory and time of plain torch.compile, which saves the problem's `reference` and obeys the tags in `LIKE_TORCH`.

    `PlanOption.time_ns` is here the time of recomputing and saving, not the time beyond the fastest plan.

    Args:
        observed: Observed peaks of plain torch.compile; None for the simulated peaks of a plan that saves the same values.
    """
    problem = obeying(problem, LIKE_TORCH)
    mask = np.zeros((len(problem.values), 1), dtype=bool)
    mask[np.array(problem.reference, dtype=np.intp)] = True
    (option,) = _described(Simulator(problem), mask, fastest_time_ns=0)
    if observed is None:
        return option
    return replace(option, forward_peak_bytes=observed.forward_peak_bytes, peak_bytes=observed.peak_bytes)


def _sizes(option: PlanOption) -> tuple[int, int, int, int]:
    return option.held_bytes, option.peak_bytes, option.forward_peak_bytes, option.kept_output_bytes


def _described(simulator: Simulator, masks: Bools, fastest_time_ns: int) -> list[PlanOption]:
    batch = simulator.run(masks)
    input_copy_bytes = simulator.input_copy_bytes(batch.recomputed)
    names = [value.name for value in simulator.problem.values]
    output_nbytes = simulator.nbytes - simulator.saved_nbytes
    return [
        PlanOption(
            saved=tuple(names[v] for v in np.flatnonzero(batch.used[:, p])),
            held_bytes=int(batch.saved_bytes[p] + input_copy_bytes[p]) + simulator.output_bytes,
            forward_peak_bytes=int(batch.forward_peak[p]),
            peak_bytes=int(batch.peak[p]),
            time_ns=int(batch.time_ns[p]) - fastest_time_ns,
            kept_output_bytes=int(output_nbytes @ batch.used[:, p]),
        )
        for p in range(masks.shape[1])
    ]
