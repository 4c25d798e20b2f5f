"""Which plan a graph gets: the budget that holds for it, and how far the user's tags are obeyed on the way there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from compile_remat._torch import joint_graph
from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import (
    BudgetError,
    ConfigError,
    SettingWarning,
    SharedBudgetError,
    TagConflictError,
    warn,
)
from compile_remat.passes import (
    LIKE_TORCH,
    MUST,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    Offer,
    Plan,
    Planner,
    Problem,
    Value,
    obeyed_tags,
    obeying,
    offers,
    relaxations,
)
from compile_remat.planning.joint_allocation import Turn, divide, step_peak_bytes
from compile_remat.planning.request import ChosenPlan, Replay, SharedOption

CONFIG_NAME = "torch._functorch.config.activation_memory_budget"
REGION_NAME = "torch.autograd.graph.region_activation_memory_budget"


# -- the budget -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The budget that holds for one graph.

    Attributes:
        limit_bytes: A bound beside a fraction: what `auto` found to be free.
        source: In words, where a budget that may be missed comes from; empty where missing it is an error.
    """

    budget: MemoryBudget
    limit_bytes: int | None = None
    source: str = ""


def asked_of(joint: joint_graph.Joint, budget: MemoryBudget, *, is_given: bool, from_auto: bool, ratio: float) -> Asked:
    """`budget` if the user gave one; else the ratio that the graph's regions or torch's own setting ask for, if any.

    A ratio of torch's becomes a fraction of the peak of the fastest plan, 0 becomes `min` and 1 `max`: torch means
    bytes that are saved, between those of the inputs and those of its default.  It never makes an error, as
    in torch: where it lies below the lowest reachable peak there is the lowest plan, and a warning.  `auto` still
    holds beside it, since it asks for nothing but to fit.

    Raises:
        ConfigError: The graph's regions do not agree on a ratio, or do not cover its forward.
    """
    annotated = joint_graph.annotated_ratios(joint.module, joint)
    if is_given:
        if annotated.any or ratio < 1:
            _warn_ignored(str(budget), REGION_NAME if annotated.ratios else CONFIG_NAME)
        return Asked(budget, source="the memory that is free" if from_auto else "")
    source = REGION_NAME if annotated.ratios else CONFIG_NAME
    ratio = _agreed(annotated, ratio)
    limit = int(budget.value or 0) if budget.kind == "bytes" else None
    if ratio == 0:
        return Asked(MemoryBudget("min"))
    if ratio < 1:
        return Asked(MemoryBudget("fraction", ratio), limit, f"{source} = {ratio:g}")
    return Asked(budget, source="the memory that is free")


def _agreed(annotated: joint_graph.Annotated, ratio: float) -> float:
    if not annotated.ratios:
        return ratio if annotated.legacy is None else annotated.legacy
    if len(annotated.ratios) > 1:
        raise ConfigError(
            f"{REGION_NAME} asks for {', '.join(f'{r:g}' for r in annotated.ratios)} in one graph, but a graph has one "
            "budget. Put a graph break (torch._dynamo.graph_break()) between the regions, use one ratio, or set "
            "memory_budget, which overrides them all."
        )
    if annotated.bare:
        raise ConfigError(
            f"{REGION_NAME} must cover the whole forward of a graph, and {len(annotated.bare)} of its operators lie "
            f"outside: {', '.join(annotated.bare[:5])}. Wrap the whole forward, put a graph break between the parts, or "
            "set memory_budget, which overrides it."
        )
    return annotated.ratios[0]


@functools.cache  # once for each pair, however many graphs a process compiles
def _warn_ignored(budget: str, name: str) -> None:
    warnings.warn(
        f"compile_remat: {name} is set, and so is memory_budget = {budget}, which wins. Leave memory_budget out to "
        "have the ratio obeyed.",
        SettingWarning,
        stacklevel=2,
    )


# -- the plan ---------------------------------------------------------------------------------------------------------


def bytes_of(planner: Planner, asked: Asked) -> int | None:
    """The bytes that a plan has to fit; None where only speed or only memory counts."""
    if asked.budget.kind == "fraction":
        budget_bytes = int(float(asked.budget.value or 0) * planner.fastest().peak_bytes)
        return min(budget_bytes, asked.limit_bytes or budget_bytes)
    return int(asked.budget.value or 0) if asked.budget.kind == "bytes" else None


def choose(planner: Planner, asked: Asked) -> ChosenPlan:
    """The plan for the budget, with as many of the user's tags obeyed as it allows.

    `max` obeys what torch obeys: MUST_SAVE and both ways to ask for a recomputation, so that ``checkpoint`` costs and
    spares what it does in torch.  Any other budget obeys PREFER_SAVE as well, and gives up PREFER_SAVE and then
    PREFER_RECOMPUTE where nothing fits otherwise (for `min`: where that lowers the peak).

    Raises:
        BudgetError: No plan fits; a `TagConflictError` if one could without MUST_SAVE and MUST_RECOMPUTE.
    """
    if asked.budget.kind == "max":
        problem = obeying(planner.problem, LIKE_TORCH)
        return ChosenPlan(_keyed(planner.on(problem).reference(), planner))
    if asked.budget.kind == "min":
        return _lowest(planner)
    budget_bytes = bytes_of(planner, asked) or 0
    missed: list[Plan] = []
    for planned, lapsed in _planners(planner):
        plan = _keyed(planned.within(budget_bytes), planner)
        if plan.is_feasible:
            return ChosenPlan(plan, message=_lapsed_text(lapsed))
        missed.append(plan)
    plan = min(missed, key=lambda p: p.peak_bytes)
    error = _conflict(planner, plan, budget_bytes)
    if not asked.source:
        raise error
    message = (
        f"{asked.source} allows {format_bytes(budget_bytes)}, which is less than the lowest reachable peak "
        f"({format_bytes(plan.peak_bytes)}); this is the lowest plan"
    )
    if isinstance(error, TagConflictError):
        message += f", and without MUST_SAVE and MUST_RECOMPUTE it would be {format_bytes(error.free_floor_bytes)}"
    warn(message)
    return ChosenPlan(plan, plan.peak_bytes, message)


def _lowest(planner: Planner) -> ChosenPlan:
    """The lowest of all; among plans as good as equal, the one that obeys the most tags."""
    found = [(_keyed(planned.lowest(), planner), lapsed) for planned, lapsed in _planners(planner)]
    near = min(plan.peak_bytes for plan, _ in found) / planner.options.same_peak
    plan, lapsed = next((plan, lapsed) for plan, lapsed in found if plan.peak_bytes <= near)
    return ChosenPlan(plan, plan.peak_bytes, _lapsed_text(lapsed))


def _planners(planner: Planner) -> Iterator[tuple[Planner, frozenset[str]]]:
    for problem, lapsed in relaxations(planner.problem):
        yield planner.on(problem), lapsed


def _keyed(plan: Plan, planner: Planner) -> Plan:
    """Whatever tags it obeys, a plan belongs to the graph as the user tagged it."""
    return replace(plan, problem_key=planner.problem.key())


def _lapsed_text(lapsed: frozenset[str]) -> str:
    if not lapsed:
        return ""
    names = " and ".join(sorted(tag.upper() for tag in lapsed))
    own = " (which torch.utils.checkpoint stands for)" if PREFER_RECOMPUTE in lapsed else ""
    return f"set aside: {names}{own}; with every tag obeyed the peak would be higher"


def choose_below(planner: Planner, asked: Asked, target_bytes: int) -> ChosenPlan:
    """The fastest plan below a target, or the lowest plan where none is."""
    budget = MemoryBudget("bytes", max(target_bytes, 1))
    try:
        return choose(planner, replace(asked, budget=budget, limit_bytes=None, source=""))
    except BudgetError:
        return choose(planner, replace(asked, budget=MemoryBudget("min"), limit_bytes=None))


def replayed(planner: Planner, request: Replay) -> ChosenPlan:
    """The plan that a request names; it may set aside what the user's tags prefer."""
    lenient = planner.on(obeying(planner.problem, MUST))
    return ChosenPlan(_keyed(lenient.plan_of(lenient.mask_of(request.saved), None, request.again), planner))


def choose_shared(planner: Planner, request: SharedOption, asked: Asked) -> ChosenPlan:
    """A plan option for a region that runs beside others, with the menu of all its options.

    Raises:
        SharedBudgetError: Nothing fits beside what the others hold.
    """
    turns = [Turn(0, request.gradient_bytes)] * max(1, request.calls)
    found: list[tuple[int, ChosenPlan]] = []
    for planned, lapsed in _planners(planner):
        offered = offers(planned)
        limit_bytes = _limit_of(asked, offered, turns)
        left_bytes = None if limit_bytes is None else limit_bytes - request.others_bytes
        if request.calls:
            (best,) = divide(turns, [offered], left_bytes).chosen
        else:
            fitting = [
                k
                for k, o in enumerate(offered)
                if left_bytes is None or o.peak_bytes + o.kept_output_bytes <= left_bytes
            ]
            best = min(
                fitting or range(len(offered)),
                key=lambda k: (offered[k].held_bytes * bool(fitting), offered[k].peak_bytes),
            )
        plan = _keyed(planned.plan_of(planned.mask_of(offered[best].saved), None), planner)
        peak_bytes = request.others_bytes + step_peak_bytes(turns, [offered[best]])
        found.append((peak_bytes, ChosenPlan(plan, message=_lapsed_text(lapsed), offers=offered)))
        if limit_bytes is None or peak_bytes <= limit_bytes:
            return found[-1][1]
    peak_bytes, choice = min(found, key=lambda f: f[0])
    assert limit_bytes is not None
    if not asked.source and not request.may_miss:
        largest = choice.plan.largest
        raise SharedBudgetError(limit_bytes, peak_bytes, largest, request.others_bytes, len(turns))
    text = (
        f"{asked.source or 'memory_budget'} allows {format_bytes(limit_bytes)}, and the graphs of this step need "
        f"{format_bytes(peak_bytes)}"
    )
    if request.may_miss:
        text += ", because the first ones were planned as if they were alone; from the next step on they are planned together"
    warn(text)
    return replace(choice, message=f"{choice.message}; {text}" if choice.message else text)


def _limit_of(asked: Asked, offered: Sequence[Offer], turns: Sequence[Turn]) -> int | None:
    """The budget of a step in bytes; a fraction of one is known only with the number of runs."""
    if asked.budget.kind == "fraction" and len(turns) > 1:
        return int(float(asked.budget.value or 0) * step_peak_bytes(turns, [min(offered, key=lambda o: o.time_ns)]))
    return int(asked.budget.value or 0) if asked.budget.kind == "bytes" else None


# -- what stands in the way -------------------------------------------------------------------------------------------


def _conflict(planner: Planner, plan: Plan, budget_bytes: int) -> BudgetError:
    """The error for a budget below the plan's peak; it names the tags if the peak would be lower without them."""
    largest = plan.largest
    if not obeyed_tags(planner.problem) & MUST:
        return BudgetError(budget_bytes, plan.peak_bytes, largest)
    free = planner.on(obeying(planner.problem, ())).lowest()
    if free.peak_bytes >= plan.peak_bytes * planner.options.same_peak:
        return BudgetError(budget_bytes, plan.peak_bytes, largest)
    return TagConflictError(
        budget_bytes, plan.peak_bytes, largest, free.peak_bytes, tuple(_in_the_way(planner.problem, plan))
    )


def _in_the_way(problem: Problem, plan: Plan) -> Iterator[LiveBuffer]:
    """Values that the plan saves or recomputes because a tag demands it, largest first."""
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
