"""Chooses the plan for a budget, and decides how far the plan obeys the user's tags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import format_bytes, format_time
from compile_remat._util.user_warnings import held_warnings
from compile_remat.budget import MemoryBudget
from compile_remat.errors import (
    BudgetError,
    TagConflictError,
    warn,
)
from compile_remat.passes import MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, Plan, Planner, Problem, Value
from compile_remat.passes.problem.constant_inputs import has_snapshots, without_snapshots
from compile_remat.passes.problem.tags import LIKE_TORCH, MUST, obeyed_tags, obeying, relaxations
from compile_remat.planning.budget_source import EffectiveBudget, below_floor_text, bytes_of, checkpoints_text
from compile_remat.planning.request import ChosenPlan, Replay
from compile_remat.report import joined

LOWER, FASTER = 0.99, 0.005
"""Another plan is reported if its peak is below the first share of the plan's peak, or saves the second share of its step time."""


def choose(planner: Planner, effective: EffectiveBudget) -> ChosenPlan:
    """Returns the plan for the budget, which obeys as many of the user's tags as the budget allows.

    `max` obeys the tags that torch obeys: MUST_SAVE, MUST_RECOMPUTE and PREFER_RECOMPUTE, so that ``checkpoint`` costs and saves
    as much as in torch.  Any other budget obeys PREFER_SAVE as well, and drops PREFER_SAVE and then PREFER_RECOMPUTE if no plan
    fits otherwise (for `min`: if that lowers the peak).

    Raises:
        BudgetError: No plan fits; a `TagConflictError` if the peak would be lower without MUST_SAVE and MUST_RECOMPUTE.
    """
    if effective.budget.kind == "max":
        problem = obeying(planner.problem, LIKE_TORCH)
        return ChosenPlan(keyed(planner.on(problem).no_worse_than_torch(), planner))
    if effective.budget.kind == "min":
        return _lowest(planner)
    budget_bytes = bytes_of(effective) or 0
    missed: list[Plan] = []
    for planned, lapsed in planners(planner):
        plan = keyed(planned.within(budget_bytes), planner)
        if plan.is_feasible:
            return ChosenPlan(plan, message=joined(lapsed_text(lapsed), moved_text(planned, plan)))
        missed.append(plan)
    plan = min(missed, key=lambda p: p.peak_bytes)
    error = _conflict(planner, plan, budget_bytes, effective.budget.written)
    if not effective.source:
        raise error
    message = below_floor_text(effective, budget_bytes, plan.peak_bytes)
    if isinstance(error, TagConflictError):
        message += f"; without MUST_SAVE and MUST_RECOMPUTE it would be {format_bytes(error.free_floor_bytes)}"
    else:
        message = joined(message, checkpoints_text(effective, planner.problem))
    warn(message)
    return ChosenPlan(plan, plan.peak_bytes, message)


def _lowest(planner: Planner) -> ChosenPlan:
    """Returns the plan of lowest peak; among plans of nearly the same peak (`same_peak`), the one that obeys the most tags."""
    found = [(planned, planned.lowest(), lapsed) for planned, lapsed in planners(planner)]
    near = min(plan.peak_bytes for _, plan, _ in found) / planner.options.same_peak
    planned, plan, lapsed = next(each for each in found if each[1].peak_bytes <= near)
    return ChosenPlan(keyed(plan, planner), plan.peak_bytes, joined(lapsed_text(lapsed), moved_text(planned, plan)))


def choose_below(planner: Planner, effective: EffectiveBudget, target_bytes: int) -> ChosenPlan:
    """Returns the fastest plan whose peak is within the target, or the lowest plan if there is none."""
    budget = MemoryBudget("bytes", max(target_bytes, 1))
    try:
        return choose(planner, replace(effective, budget=budget, limit_bytes=None, source=""))
    except BudgetError:
        return choose(planner, replace(effective, budget=MemoryBudget("min"), limit_bytes=None))


def replayed(planner: Planner, request: Replay) -> ChosenPlan:
    """Returns the plan that a request names; it obeys only MUST_SAVE and MUST_RECOMPUTE."""
    lenient = planner.on(obeying(planner.problem, MUST))
    return ChosenPlan(keyed(lenient.plan_of(lenient.mask_of(request.saved), None, request.again), planner))


def planners(planner: Planner) -> Iterator[tuple[Planner, frozenset[str]]]:
    for problem, lapsed in relaxations(planner.problem):
        yield planner.on(problem), lapsed


def keyed(plan: Plan, planner: Planner) -> Plan:
    """Returns the plan with the key of the problem as the user tagged it, regardless of the tags that the plan obeys."""
    return replace(plan, problem_key=planner.problem.key())


def lapsed_text(lapsed: frozenset[str]) -> str:
    if not lapsed:
        return ""
    names = " and ".join(sorted(tag.upper() for tag in lapsed))
    own = " (the tag of torch.utils.checkpoint)" if PREFER_RECOMPUTE in lapsed else ""
    return f"tags of activation checkpointing set aside: {names}{own}; with them the peak would be higher"


def moved_text(planner: Planner, plan: Plan) -> str:
    """Text: the plan's peak needs host memory; empty if recomputation alone reaches it, or nothing leaves."""
    budget_bytes = plan.budget_bytes
    if not plan.offloaded or (budget_bytes is not None and planner.kept_within(budget_bytes).is_feasible):
        return ""
    moved, peak = format_bytes(plan.offloaded_bytes), format_bytes(planner.lowest_kept().peak_bytes)
    return f"{moved} wait in host memory: the lowest plan found that only recomputes peaks at {peak}"


def _conflict(planner: Planner, plan: Plan, budget_bytes: int, written: str) -> BudgetError:
    """Returns the error for a budget below the plan's peak; the error names the tags if the peak would be lower without them."""
    largest = plan.largest
    if not obeyed_tags(planner.problem) & MUST:
        return BudgetError(budget_bytes, plan.peak_bytes, largest, written)
    free = planner.on(obeying(planner.problem, ())).lowest()
    if free.peak_bytes >= plan.peak_bytes * planner.options.same_peak:
        return BudgetError(budget_bytes, plan.peak_bytes, largest, written)
    return TagConflictError(
        budget_bytes, plan.peak_bytes, largest, free.peak_bytes, tuple(_in_the_way(planner.problem, plan)), written
    )


def _in_the_way(problem: Problem, plan: Plan) -> Iterator[LiveBuffer]:
    """Yields the values that the plan saves or recomputes because of a MUST tag, largest first."""
    held = {(MUST_SAVE, name) for name in plan.saved} | {(MUST_RECOMPUTE, name) for name in plan.recomputed}
    tagged = [v for v in problem.values if v.nbytes and (v.tag, v.name) in held]
    for value in sorted(tagged, key=lambda v: (-v.nbytes, v.name)):
        yield _tagged_tensor(value)


def _tagged_tensor(value: Value) -> LiveBuffer:
    origin = value.origin
    region = f" in checkpointed region {origin.region}" if origin.region else ""
    role = f"{value.tag.upper()}{region}"
    return LiveBuffer(
        value.name, value.nbytes, origin.shape, origin.dtype, origin.module_path, origin.source_line, role
    )


# -- inputs that may change ---------------------------------------------------------------------------------------------


def snapshots_of(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Returns fields of a `Report`: the number of input snapshots that a plan saves, their bytes and the time of copying them."""
    saved = frozenset(plan.saved)
    found = [value for value in problem.values if value.is_snapshot and value.name in saved]
    return {
        "num_snapshots": len(found),
        "snapshot_bytes": sum(value.nbytes for value in found),
        "snapshot_time_ns": sum(value.save_time_ns for value in found),
    }


def constant_floor_bytes(planner: Planner) -> int | None:
    """Returns the minimum peak if the backward could read every input; None if it already can (the problem has no snapshots)."""
    if not has_snapshots(planner.problem):
        return None
    lenient = planner.on(without_snapshots(planner.problem))
    return min(planned.lowest().peak_bytes for planned, _ in planners(lenient))


def gain_of_constant(planner: Planner, plan: Plan, effective: EffectiveBudget, *, is_asked: bool) -> str:
    """Returns the sentence for `explain` if `inputs="constant"` gave a lower or faster plan; empty if not, or without snapshots."""
    is_asked = is_asked and effective.budget.kind != "max"
    if not is_asked or not snapshots_of(planner.problem, plan)["num_snapshots"]:
        return ""
    try:
        with held_warnings():  # of a plan that is not taken
            other = choose(planner.on(without_snapshots(planner.problem)), effective).plan
    except BudgetError:
        return ""
    is_lower = other.peak_bytes < LOWER * plan.peak_bytes
    is_faster = plan.extra_time_ns - other.extra_time_ns >= FASTER * plan.once_time_ns
    if not (is_lower if effective.budget.kind == "min" or not plan.is_feasible else is_faster):
        return ""
    return (
        f'with inputs="constant" the peak would be {format_bytes(other.peak_bytes)} and the extra time '
        f"{format_time(other.extra_time_ns)}, because the backward could read every input again"
    )
