"""A plan that was found where every value has a narrow form, in the graph that has those alone that it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from compile_remat._torch.joint_graph import Joint
from compile_remat.passes import MUST, NarrowForm, Plan, Planner, ProblemBuilder, Status, keep_narrow, obeying
from compile_remat.planning.request import ChosenPlan, Fit, FitBelow, Request


@dataclass(frozen=True)
class SearchedGraph:
    """A joint graph with a plan that was found for it.

    Attributes:
        forms: The narrow forms that it has.
        builder: Builds its problems.
        planner: Found the plan.
    """

    joint: Joint
    forms: tuple[NarrowForm, ...]
    builder: ProblemBuilder
    planner: Planner
    chosen: ChosenPlan

    def narrowed_by(self, plan: Plan) -> tuple[str, ...]:
        """Names of the values that a plan of this graph saves in a narrow form."""
        return tuple(form.value.name for form in self.forms if form.narrow.name in plan.saved)

    def incumbent(self, found: ChosenPlan, chosen: ChosenPlan) -> ChosenPlan:
        """What a search goes on with that a deadline ended: `found`, in the graph with all forms, where `chosen` saves some."""
        narrowed = self.narrowed_by(chosen.plan)
        return replace(found, plan=replace(found.plan, narrowed=narrowed)) if narrowed else chosen


def with_saved_forms(
    searched: SearchedGraph,
    builder_of: Callable[[Joint], ProblemBuilder],
    search: Callable[[Planner], ChosenPlan],
    request: Request,
    budget_bytes: int | None,
) -> SearchedGraph:
    """The same graph, in place, with the forms alone that its plan saves, and the plan with its figures there.

    Where the backward computed a narrow form, it could drop early what that was made of.  Without the form the plan may be above
    what it was to keep: then another one is searched for.
    """
    if not searched.forms:
        return searched
    found = searched.chosen
    joint, forms, dropped = keep_narrow(searched.joint, searched.forms, found.plan.saved)
    builder = builder_of(joint)
    planner = searched.planner.on(builder.build())
    chosen = _without(dropped, found, planner, budget_bytes)
    limit_bytes = request.target_bytes if isinstance(request, FitBelow) else budget_bytes
    if isinstance(request, Fit | FitBelow) and _misses(chosen, found, limit_bytes):
        chosen = search(planner)
    return SearchedGraph(joint, forms, builder, planner, chosen)


def _without(dropped: Mapping[str, str], found: ChosenPlan, planner: Planner, budget_bytes: int | None) -> ChosenPlan:
    """A choice, with the figures that it has in `planner`'s problem, where the dropped nodes' values stand for them."""
    plan = found.plan
    saved = dict.fromkeys(dropped.get(name, name) for name in plan.saved)
    again = dict.fromkeys(dropped.get(name, name) for name in plan.again)
    lenient = planner.on(obeying(planner.problem, MUST))  # a plan may have set aside what the tags prefer
    other = lenient.plan_of(lenient.mask_of(saved), budget_bytes, [name for name in again if name not in saved])
    status = plan.status if other.is_feasible == plan.is_feasible else other.status
    floor_bytes = other.peak_bytes if found.floor_bytes == plan.peak_bytes else found.floor_bytes
    return replace(found, plan=replace(other, status=status), floor_bytes=floor_bytes)


def _misses(chosen: ChosenPlan, found: ChosenPlan, limit_bytes: int | None) -> bool:
    """Whether a plan is above a limit that it kept with all narrow forms, or above its own peak where there is no limit."""
    peak_bytes = chosen.plan.peak_bytes
    if found.plan.status is Status.REPLAYED or peak_bytes <= found.plan.peak_bytes:
        return False
    return limit_bytes is None or peak_bytes > limit_bytes >= found.plan.peak_bytes
