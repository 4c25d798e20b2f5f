"""Turns AOTAutograd's joint graph into a plan and its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compile_remat._torch import joint_graph
from compile_remat.cost_models import CostModel
from compile_remat.errors import BudgetError, warn
from compile_remat.passes import Plan, Planner, Problem, plain_time_ns
from compile_remat.passes.graph.rewrites.early_gradients import marked_bytes
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.passes.problem.work_budget import CLOCK
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of
from compile_remat.planning.deadline import deadline_of, noting_early_end, with_search_message
from compile_remat.planning.joint_problem import PlanContext, PreparedGraph
from compile_remat.planning.plan_policy import (
    LOWER,
    choose,
    choose_below,
    constant_floor_bytes,
    gain_of_constant,
    replayed,
    snapshots_of,
)
from compile_remat.planning.plan_store import (
    PinnedInSlices,
    PinnedPlan,
    fitted,
    keeping_all,
    note_plan_of_constant_inputs,
    stored_plan,
)
from compile_remat.planning.request import (
    ChosenPlan,
    Fit,
    FitBelow,
    Replay,
    Request,
    Resume,
    SharedOption,
    interrupted_by,
)
from compile_remat.planning.searches import Searches
from compile_remat.planning.settings import MOVES_NOTHING, SHARES_BUDGET, Settings
from compile_remat.planning.shared_policy import choose_shared
from compile_remat.planning.size_search import Varying, log_unbounded_sizes, range_of
from compile_remat.report import Report, joined

LATE = "gradients = early is off for this graph: "
"""Prefix of the report's message; the reason why gradients leave the backward at its end follows."""


@dataclass(frozen=True)
class Planned:
    """A plan with its joint graph, cost model, problem and report.

    Attributes:
        resume: The request that takes this plan unchanged; set only if the deadline has just ended the search for the plan.
    """

    joint: joint_graph.Joint
    cost: CostModel
    problem: Problem
    plan: Plan
    report: Report
    resume: Resume | None = None


def plan_joint(
    prepared: PreparedGraph,
    settings: Settings,
    request: Request,
    context: PlanContext,
    pinned: PinnedPlan | None = None,
) -> Planned:
    """Returns the plan of one variant of a joint graph, with its report.

    Args:
        pinned: The plan that a file holds for this graph; None to look it up in `plan_dir`.

    Raises:
        BudgetError: No plan fits the budget.
        PlanMismatchError: The plan in `plan_dir` for this graph's key does not fit the graph; `PinnedInSlices` if that plan has
            rows in slices.
    """
    problem, budget = prepared.problem, prepared.effective
    deadline = deadline_of(problem, settings.time_limit) if context.has_deadline else None
    request_now = interrupted_by(request)
    kept = _why_kept(prepared.joint, request_now) if settings.link is not None else ""
    link = None if kept else settings.link
    planner = (context.searches or Searches()).planner(problem, settings.time_limit, deadline, link)
    if isinstance(request, Resume) and request.problem_key != problem.key():
        request = request_now  # the incumbent belongs to another graph of the compilation
    chosen = _chosen(planner, request, prepared, settings, pinned)
    is_asked = context.with_plain and isinstance(request_now, Fit)
    said = gain_of_constant(planner, chosen.plan, budget, is_asked=is_asked)
    chosen = replace(chosen, message=joined(joined(chosen.message, said), kept))
    if context.with_floor and chosen.floor_bytes is None:
        chosen = replace(chosen, floor_bytes=planner.lowest().peak_bytes)
    resume = Resume(request_now, problem.key(), chosen) if CLOCK in planner.ends else None
    plan = replace(
        chosen.plan,
        budget_bytes=_bytes_for(request_now, budget),
        problem_key=problem.key(),
        plain_time_ns=plain_time_ns(prepared.with_torch),
        pictures=PlanPictures(
            problem, prepared.plain_problem, observed=context.assumed.plain, work_seconds=settings.time_limit, link=link
        ),
    )
    late = prepared.late and LATE + prepared.late
    if late:
        warn(late)
    chosen = replace(chosen, plan=plan, message=joined(chosen.message, late))
    report = _report(prepared, chosen)
    if plan.budget_bytes is not None:
        log_unbounded_sizes(prepared.joint)
    varying = Varying(prepared.joint, problem, prepared.cost, settings.expandable)
    report = replace(report, size_range=range_of(varying, request_now, budget, planner, plan, prepared.plain))
    return Planned(prepared.joint, prepared.cost, problem, plan, report, resume)


def _why_kept(joint: joint_graph.Joint, request: Request) -> str:
    """Returns the reason, for the report, why a graph moves nothing although `offload` is on; empty if it may."""
    if joint_graph.has_symbolic_sizes(joint):
        return f"{MOVES_NOTHING}the graph's sizes vary"
    return SHARES_BUDGET if isinstance(request, SharedOption | Replay) else ""


def _bytes_for(request: Request, effective: EffectiveBudget) -> int | None:
    """Returns the bytes that the peak may reach; None for a request that compares the plan with no budget of its own."""
    return None if isinstance(request, SharedOption | Replay) else bytes_of(effective)


def _report(prepared: PreparedGraph, chosen: ChosenPlan) -> Report:
    plan, early_bytes = chosen.plan, marked_bytes(prepared.joint)
    return Report(
        plan.problem_key,
        str(prepared.effective.budget),
        plan.budget_bytes,
        plan,
        chosen.floor_bytes,
        message=chosen.message,
        num_early=len(early_bytes),
        early_bytes=sum(early_bytes),
        offers=chosen.offers,
        left_bytes=chosen.left_bytes,
        plain=prepared.plain,
        estimated_ops=prepared.problem.estimated,
        **snapshots_of(prepared.problem, plan),
    )


@contextmanager
def _naming_graph(planner: Planner) -> Iterator[None]:
    """Adds the graph's key to a `BudgetError` from the body, and the minimum peak under `inputs="constant"` if that is lower."""
    try:
        yield
    except BudgetError as error:
        error.graph_key = planner.problem.key()
        floor_bytes = constant_floor_bytes(planner)
        if floor_bytes is None or floor_bytes >= LOWER * error.floor_bytes:
            raise
        raise error.with_constant_floor(floor_bytes) from None


def _chosen(
    planner: Planner,
    request: Request,
    prepared: PreparedGraph,
    settings: Settings,
    given: PinnedPlan | None,
) -> ChosenPlan:
    """Returns the plan that a request asks for; a plan from a search that ended early has a message that says so."""
    effective, plain = prepared.effective, prepared.plain
    with noting_early_end(planner), _naming_graph(planner):
        match request:
            case Resume():
                return request.incumbent
            case Replay():
                chosen = replayed(planner, request)
            case SharedOption():
                assert plain is not None
                chosen = choose_shared(planner, request, effective, plain)
            case FitBelow():
                chosen = choose_below(planner, effective, request.target_bytes)
            case Fit():
                pinned = given or stored_plan(planner.problem.key(), settings.plan_dir)
                if pinned is not None and pinned.plan.sliced and given is None:
                    raise PinnedInSlices(pinned, effective, plain)
                if pinned is not None:
                    kept = keeping_all(pinned) if settings.moves_nothing else pinned
                    return fitted(planner, kept, bytes_of(effective))
                note_plan_of_constant_inputs(planner.problem, settings.plan_dir)
                chosen = choose(planner, effective)
    return with_search_message(chosen, planner)
