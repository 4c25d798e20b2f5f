"""Turns a joint graph, as torch hands it to a partitioner, into a planning problem: the only way from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.fake import say_device
from compile_remat._torch.joint_graph import ReadableInputs, copied_graph
from compile_remat.cost_models import CostModel, Profile
from compile_remat.passes import NOTHING_ASSUMED, Assumptions, PlanOption, Problem, ProblemBuilder, plain_option
from compile_remat.passes.graph.inner_backward import with_whole_forward
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.outputs import changeable_outputs, left_alone
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context
from compile_remat.passes.graph.rewrites.early_gradients import NO_LEAF
from compile_remat.passes.graph.snapshots import readable_inputs
from compile_remat.planning.budget_source import EffectiveBudget, effective_budget
from compile_remat.planning.request import Replay, Request, SharedOption, interrupted_by
from compile_remat.planning.searches import Searches
from compile_remat.planning.settings import Settings


@dataclass(frozen=True)
class JointModule:
    """A joint graph as torch hands it to a partitioner.  Planning rewrites it in place.

    Attributes:
        num_fwd_outputs: Number of outputs that belong to the forward.
        static_lifetime_input_indices: Positions of the inputs that live as long as the model.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    static_lifetime_input_indices: Sequence[int] | None = None

    def copied(self, *, is_on_cpu: bool = False) -> JointModule:
        """Returns a copy with the same nodes and fake values.

        Args:
            is_on_cpu: True if the graph was traced on a CPU, but planning may have let its tensors claim to be on another device:
                they claim to be on the CPU again, so that operators may run on them.
        """
        module = copied_graph(self.module)
        if is_on_cpu:
            say_device(module, torch.device("cpu"))
        return replace(self, module=module)

    def classified(self) -> joint_graph.Joint:
        """Returns the graph after torch's own passes, see `as_in_torch`."""
        return as_in_torch(
            self.module,
            num_fwd_outputs=self.num_fwd_outputs,
            static_lifetime_input_indices=self.static_lifetime_input_indices,
        )


@dataclass(frozen=True)
class PlanContext:
    """The facts beside settings and request that are the same for all variants of a graph.

    Attributes:
        has_deadline: True if a deadline may end the search; False if the caller cannot compile once more.
        is_inner: True if the graph is the module of an `InnerBackward`.
        with_plain: Also report the peak of plain torch.compile, whatever the budget, and the gain from `inputs="constant"`; the
            plan stays the same.
        with_floor: Also report the lowest reachable peak, whatever the budget.
        for_budgets: True to split convolutions even under `max`, as for any other budget.
        early: Positions of the arguments whose gradients leave the backward when they are made.
        assumed: Facts observed of earlier plans of this graph, which replace crude rules.
        searches: The planners of earlier rounds.
        device: The device that the tensors of the graph claim to be on once they are no longer computed with; None if they are
            where they run.
        in_blocks: True to count bytes in the blocks of torch's CUDA allocator.
        times_ns: Names and times of nodes that the cost model does not price.
        source: Origin of a budget that may be exceeded, in words; empty for the words of `source_of`.
        torch_budgets: Budgets of torch's own chooser at which its saved nodes are looked up; the first one is torch's default.
    """

    has_deadline: bool = True
    is_inner: bool = False
    with_plain: bool = False
    with_floor: bool = False
    for_budgets: bool = False
    early: tuple[int, ...] = ()
    assumed: Assumptions = NOTHING_ASSUMED
    searches: Searches | None = None
    device: torch.device | None = None
    in_blocks: bool = True
    times_ns: tuple[tuple[str, int], ...] = ()
    source: str = ""
    torch_budgets: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class PreparedGraph:
    """A joint graph after all rewrites, with its planning problem.

    Attributes:
        torch_sets: The nodes that torch's own chooser saves, at each of `PlanContext.torch_budgets`.
        effective: The budget that holds for the graph; a fraction knows the peak of plain torch.compile.
        plain_problem: The problem of the graph without rewrites, for the plan of plain torch.compile; None if nobody needs it.
        plain: The plan option of plain torch.compile; None if nobody needs it.
        late: The reason why gradients that were to leave early leave at the backward's end; empty if none do.
    """

    joint: joint_graph.Joint
    builder: ProblemBuilder
    problem: Problem
    torch_sets: tuple[Sequence[fx.Node], ...]
    effective: EffectiveBudget
    plain_problem: Problem | None = None
    plain: PlanOption | None = None
    late: str = ""

    @property
    def cost(self) -> CostModel:
        """The cost model that priced the problem."""
        return self.builder.cost

    @cached_property
    def with_torch(self) -> Problem:
        """The problem with the values that plain torch.compile saves as a candidate for its plans."""
        return replace(self.problem, reference=self.builder.saved_by(self.torch_sets[0], self.problem))


def prepare(
    graph: JointModule,
    settings: Settings,
    request: Request,
    context: PlanContext,
    *,
    effective: EffectiveBudget | None = None,
    readable: ReadableInputs | None = None,
) -> PreparedGraph | None:
    """Rewrite a joint graph, in place, and build its problem; returns None if nothing depends on a tangent.

    Args:
        effective: The budget of the graph of which this one is a variant; None to find it.
        readable: The inputs that the backward may read; None if plain torch.compile would split this very graph.

    Raises:
        ConfigError: Torch's annotations of a memory budget contradict each other.
    """
    joint = graph.classified()
    if not joint.has_backward:
        return None
    if context.is_inner:
        joint = with_whole_forward(joint)
    budget = effective or effective_budget(
        joint,
        settings.budget,
        is_given=settings.is_given,
        from_auto=settings.from_auto,
        ratio=settings.torch_ratio,
    )
    if budget.source and context.source:
        budget = replace(budget, source=context.source)
    needs_plain = effective is None and _needs_plain(budget, interrupted_by(request))
    joint, torch_sets, is_decided = _with_borders(joint, readable, context)
    if context.device is not None:
        say_device(joint.module, context.device)
    plain_problem, plain = None, None
    if needs_plain or context.with_plain:
        plain_problem = _builder(joint, settings, context).build(torch_sets[0])
        plain = plain_option(plain_problem, context.assumed.plain)
        if effective is None and budget.budget.kind == "fraction":
            budget = replace(budget, plain_bytes=max(settings.plain_bytes, plain.peak_bytes))
    is_max = budget.budget.kind == "max"
    wanted = Context(
        splits_convolutions=context.for_budgets or not is_max,
        early=context.early or None,
        passes=settings.joint_passes,
        has_snapshots=not settings.inputs_are_constant,
    )
    done = apply_to_joint(joint, wanted)
    joint, late = done.joint, "" if done.why_not == NO_LEAF else done.why_not  # the user need not know of the latter
    builder = _builder(joint, settings, context)
    reference = torch_sets[0] if needs_plain or is_max or is_decided else ()
    problem = builder.build(reference).with_facts(context.assumed)
    return PreparedGraph(joint, builder, problem, torch_sets, budget, plain_problem, plain, late)


def priced_problem(joint: joint_graph.Joint, settings: Settings, reference: Sequence[fx.Node]) -> Problem:
    """Returns the planning problem of a joint graph that is rewritten already, on the settings' device.

    Args:
        reference: Nodes that torch's own chooser saves; empty if the planner is not to try them.
    """
    return _builder(joint, settings, PlanContext()).build(reference)


def _needs_plain(budget: EffectiveBudget, request: Request) -> bool:
    return isinstance(request, SharedOption) or (budget.budget.kind == "fraction" and not isinstance(request, Replay))


def _with_borders(
    joint: joint_graph.Joint, readable: ReadableInputs | None, context: PlanContext
) -> tuple[joint_graph.Joint, tuple[Sequence[fx.Node], ...], bool]:
    """Returns the graph with two sets: the outputs that no plan may save, and the inputs that its backward may read.

    Code outside of the graph may change them before the backward; around an inner backward there is no such code.  Also returns the
    nodes that torch's own chooser saves at each budget, and True if they have decided which outputs no plan may save.
    """
    changeable = frozenset() if context.is_inner else changeable_outputs(joint)
    torch_sets = tuple(joint_graph.torch_choices(joint, context.torch_budgets))
    if context.is_inner:
        readable = None
    elif readable is None:
        readable = readable_inputs(joint, torch_sets[0])
    joint = replace(joint, left_alone=left_alone(changeable, torch_sets[0]), readable=readable)
    return joint, torch_sets, bool(changeable)


def _builder(joint: joint_graph.Joint, settings: Settings, context: PlanContext) -> ProblemBuilder:
    cost = settings.cost(joint.module.graph)
    if context.times_ns:
        cost = Profile(cost, context.times_ns)
    return ProblemBuilder(joint, cost, settings.workspace, in_blocks=context.in_blocks, expandable=settings.expandable)
