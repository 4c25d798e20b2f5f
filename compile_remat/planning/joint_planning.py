"""Turns AOTAutograd's joint graph into a plan and its report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.joint_graph import ReadableInputs
from compile_remat.cost_models import CostModel
from compile_remat.errors import BudgetError, warn
from compile_remat.passes import (
    CLOCK,
    NO_LEAF,
    NOTHING_ASSUMED,
    Assumptions,
    Plan,
    Planner,
    PlanOption,
    Problem,
    ProblemBuilder,
    Status,
    add_snapshots,
    as_in_torch,
    build_problem,
    changeable_outputs,
    left_alone,
    mark_gradients,
    marked_bytes,
    pictured,
    plain_option,
    plain_time_ns,
    readable_inputs,
    rewritten,
    with_whole_forward,
)
from compile_remat.planning.budget_source import EffectiveBudget, bytes_of, effective_budget
from compile_remat.planning.deadline import deadline_of, noting_early_end, with_search_message
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
    note_plan_of_constant_inputs,
    store_plan,
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
from compile_remat.planning.settings import Settings
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
    joint_module: fx.GraphModule,
    settings: Settings,
    request: Request,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    has_deadline: bool = True,
    is_inner: bool = False,
    with_plain: bool = False,
    for_budgets: bool = False,
    is_stored: bool = True,
    pinned: PinnedPlan | None = None,
    early: tuple[int, ...] = (),
    readable: ReadableInputs | None = None,
    assumed: Assumptions = NOTHING_ASSUMED,
    searches: Searches | None = None,
) -> Planned | None:
    """Plan one joint graph; returns None if nothing depends on a tangent, so that there is nothing to choose.

    Args:
        has_deadline: True if a deadline may end the search; False if the caller cannot compile once more.
        is_inner: True if the graph is the module of an `InnerBackward`.
        with_plain: Also report the peak of plain torch.compile, whatever the budget, and the gain from `inputs="constant"`; the
            plan stays the same.
        early: Positions of the arguments whose gradients leave the backward when they are made.
        for_budgets: True to split convolutions even under `max`, as for any other budget.
        is_stored: True to write the plan to `plan_dir`.
        pinned: The plan that a file holds for this graph; None to look it up in `plan_dir`.
        readable: The inputs that the backward may read; None if plain torch.compile would split this very graph.
        assumed: Facts observed of earlier plans of this graph, which replace crude rules.
        searches: The planners of earlier rounds.

    Raises:
        BudgetError: No plan fits the budget.
        ConfigError: Torch's annotations of a memory budget contradict each other.
        PlanMismatchError: The plan in `plan_dir` for this graph's key does not fit the graph; `PinnedInSlices` if that plan has
            rows in slices.
    """
    start = time.perf_counter()
    joint = as_in_torch(
        joint_module,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=static_lifetime_input_indices,
    )
    if not joint.has_backward:
        return None
    if is_inner:
        joint = with_whole_forward(joint)
    effective = effective_budget(
        joint,
        settings.budget,
        is_given=settings.is_given,
        from_auto=settings.from_auto,
        ratio=settings.torch_ratio,
    )
    request_now = interrupted_by(request)
    is_fraction = effective.budget.kind == "fraction"
    needs_plain = isinstance(request_now, SharedOption) or (is_fraction and not isinstance(request_now, Replay))
    is_max = effective.budget.kind == "max"
    joint, torch_saves, is_known = _with_borders(joint, readable, is_inner=is_inner, is_candidate=needs_plain or is_max)
    reference = torch_saves if is_known else ()
    plain_problem, plain = None, None
    if needs_plain or with_plain:
        plain_problem, _ = priced_problem(joint, settings, torch_saves)
        plain = plain_option(plain_problem, assumed.plain)
    if plain is not None and is_fraction:
        effective = replace(effective, plain_bytes=max(settings.plain_bytes, plain.peak_bytes))
    joint = rewritten(joint, splits_convolutions=for_budgets or effective.budget.kind != "max")
    joint, at_the_end = _with_marks(joint, early)
    joint = add_snapshots(joint, are_wanted=not settings.inputs_are_constant)
    cost = settings.cost(joint.module.graph)
    builder = ProblemBuilder(joint, cost, settings.workspace, expandable=settings.expandable)
    problem = builder.build(reference).with_facts(assumed)
    deadline = deadline_of(problem, settings.time_limit) if has_deadline else None
    planner = (searches or Searches()).planner(problem, settings.time_limit, deadline)
    budget_bytes = None if isinstance(request_now, SharedOption | Replay) else bytes_of(effective)
    if isinstance(request, Resume) and request.problem_key != problem.key():
        request = request_now  # the incumbent belongs to another graph of the compilation
    chosen = _chosen(planner, request, effective, settings, budget_bytes, plain, pinned)
    plain_ns = plain_time_ns(replace(problem, reference=builder.saved_by(torch_saves, problem)))
    said = gain_of_constant(planner, chosen.plan, effective, is_asked=with_plain and isinstance(request_now, Fit))
    chosen = replace(chosen, message=joined(chosen.message, said))
    resume = Resume(request_now, problem.key(), chosen) if CLOCK in planner.ends else None
    plan = pictured(
        replace(chosen.plan, budget_bytes=budget_bytes, problem_key=problem.key(), plain_time_ns=plain_ns),
        problem,
        plain_problem,
        observed=assumed.plain,
        work_seconds=settings.time_limit,
    )
    if is_stored and resume is None and isinstance(request, Fit | FitBelow) and plan.status is not Status.REPLAYED:
        store_plan(plan, settings.plan_dir)
    seconds = time.perf_counter() - start
    report = Report(
        plan.problem_key, str(effective.budget), plan.budget_bytes, plan, chosen.floor_bytes, seconds, chosen.message
    )
    if at_the_end:
        warn(LATE + at_the_end)
        report = replace(report, message=joined(report.message, LATE + at_the_end))
    early_bytes = marked_bytes(joint)
    report = replace(report, **snapshots_of(problem, plan))
    report = replace(report, num_early=len(early_bytes), early_bytes=sum(early_bytes))
    report = replace(report, offers=chosen.offers, plain=plain, estimated_ops=problem.estimated)
    if budget_bytes is not None:
        log_unbounded_sizes(joint)
    varying = Varying(joint, problem, cost, settings.expandable)
    report = replace(report, size_range=range_of(varying, request_now, effective, planner, plan, plain))
    return Planned(joint, cost, problem, plan, report, resume)


def _with_borders(
    joint: joint_graph.Joint, readable: ReadableInputs | None, *, is_inner: bool, is_candidate: bool
) -> tuple[joint_graph.Joint, Sequence[fx.Node], bool]:
    """Returns the graph with two sets: the outputs that no plan may save, and the inputs that its backward may read.

    Code outside of the graph may change them before the backward; with `is_inner` there is no such code.  Also returns the nodes
    that torch's own chooser saves, and True if the planner is to try them: if `is_candidate`, or if they decide the outputs.
    """
    changeable = frozenset() if is_inner else changeable_outputs(joint)
    plain = joint_graph.plain_choice(joint)
    if is_inner:
        readable = None
    elif readable is None:
        readable = readable_inputs(joint, plain)
    joint = replace(joint, left_alone=left_alone(changeable, plain), readable=readable)
    return joint, plain, is_candidate or bool(changeable)


def inputs_read_by_plain(
    joint_module: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> ReadableInputs | None:
    """Returns the inputs that plain torch.compile's backward reads; None if there is no backward.  Rewrites the graph in place."""
    joint = as_in_torch(
        joint_module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
    )
    return readable_inputs(joint, joint_graph.plain_choice(joint)) if joint.has_backward else None


def _with_marks(joint: joint_graph.Joint, early: tuple[int, ...]) -> tuple[joint_graph.Joint, str]:
    """Returns the graph with its early gradients marked, and the reason if there are none (empty if the user need not know)."""
    if not early:
        return joint, ""
    joint, why_not = mark_gradients(joint, early)
    return joint, "" if why_not == NO_LEAF else why_not


def priced_problem(
    joint: joint_graph.Joint, settings: Settings, reference: Sequence[fx.Node]
) -> tuple[Problem, CostModel]:
    """Returns the planning problem of a joint graph on the settings' device, and the cost model that priced it.

    Args:
        reference: Nodes that torch's own chooser saves; empty if the planner is not to try them.
    """
    cost = settings.cost(joint.module.graph)
    workspace, expandable = settings.workspace, settings.expandable
    return build_problem(joint, cost=cost, reference=reference, workspace=workspace, expandable=expandable), cost


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
    effective: EffectiveBudget,
    settings: Settings,
    budget_bytes: int | None,
    plain: PlanOption | None,
    given: PinnedPlan | None,
) -> ChosenPlan:
    """Returns the plan that a request asks for; a plan from a search that ended early has a message that says so."""
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
                    raise PinnedInSlices(pinned, budget_bytes, plain)
                if pinned is not None:
                    return fitted(planner, pinned, budget_bytes)
                note_plan_of_constant_inputs(planner.problem, settings.plan_dir)
                chosen = choose(planner, effective)
    return with_search_message(chosen, planner)
