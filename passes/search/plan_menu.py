"""Plans of one graph to choose from where it shares a budget with others.

Alone, a graph needs its peak.  Beside others it is also in their way: what it saves, and what it returns, lies there from
the end of its forward to its backward, while others run.  So here a plan has three sizes, and none is left out that is
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
    """What one plan costs the others, and what it costs itself.

    Attributes:
        saved: Names of the values that it saves.
        held_bytes: What lies there between its forward and its backward: what is saved, the outputs, and copies of inputs.
        forward_peak_bytes: The most bytes live at once in its forward.
        peak_bytes: The same of forward and backward.
        time_ns: Estimated time beyond the fastest plan.
        kept_output_bytes: Outputs that its own backward reads.  They lie there beside the gradients that come in; of the others
            the graph that read them has let go by then.
    """

    saved: tuple[str, ...]
    held_bytes: int
    forward_peak_bytes: int
    peak_bytes: int
    time_ns: int
    kept_output_bytes: int = 0


def plan_options(planner: Planner) -> tuple[PlanOption, ...]:
    """Plans of which none is better than another in time and every size, fastest first."""
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
    """What a plan costs where its graph runs beside others."""
    mask = planner.mask_of(plan.saved)[:, None]
    (option,) = _described(planner.simulator, mask, planner.fastest_time_ns)
    return option


def backward_peak_bytes(planner: Planner, plan: Plan) -> int:
    """The most bytes live at once in a plan's backward, what it saved and the outputs among them."""
    return int(planner.simulator.one(planner.mask_of(plan.saved)).backward_peak[0])


def plain_option(problem: Problem, observed: PlainFacts | None = None) -> PlanOption:
    """What plain torch.compile takes: the problem's `reference` is saved, and those tags hold that torch obeys.

    Its time is that of what it recomputes.

    Args:
        observed: Its peaks, where they are known; else they are those of a plan that saves the same.
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
