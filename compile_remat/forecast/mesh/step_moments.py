"""The moments of a rank's step, and the bytes allocated at each of them: by the graphs, and by DDP or FSDP2 around them.

The graphs and the wrapper seldom have their peaks at the same moment, so the peak of a step is the maximum, over all moments, of
the sum of both.  The graphs hold, at a moment of `ranks.fsdp_step`:

    gather, copy out, forward    the saved tensors of earlier graphs; in the forward also this graph's own peak
    gather again, ahead          the same and this graph's saved tensors, gradients of code between blocks, and this graph's outputs
                                 if its backward reads them: the incoming gradients replace the other outputs
    backward                     the saved tensors of earlier graphs, this graph's own peak, and these gradients
    copy in, reduce, cast back   the saved tensors of earlier graphs; FSDP2 holds the gradients by then
    optimizer                    nothing: only shards of gradients and the workspace of the optimizer's step are allocated

Under DDP (``torch.nn.parallel.DistributedDataParallel``), whose buckets are there from its construction on, only ``forward``,
``backward`` and ``optimizer`` are moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compile_remat.forecast.mesh.rank_trace import GraphCall
from compile_remat.forecast.mesh.shards import Shards
from compile_remat.passes import Plan, Planner
from compile_remat.passes.search.plan_menu import backward_peak_bytes, option_of
from compile_remat.planning.joint_allocation import RegionCall
from compile_remat.ranks.fsdp_step import At, FsdpMoment, fsdp_moments

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of one graph under its plan.

    Attributes:
        forward_bytes: The peak of its forward.
        backward_bytes: The peak of its backward.
        held_bytes: Bytes held between the forward and the backward.
        kept_output_bytes: Bytes of outputs that its own backward reads.
    """

    forward_bytes: int
    backward_bytes: int
    held_bytes: int
    kept_output_bytes: int


@dataclass(frozen=True)
class StepMoment:
    """One moment of a step.

    Attributes:
        at: Kind of the moment: a value of `At`, or `OPTIMIZER`.
        where: The run of a graph to which the moment belongs, in words; empty at the end of the step.
        graph_bytes: Bytes that graphs hold, gradients and the optimizer's workspace.
        wrapper_bytes: Bytes that DDP or FSDP2 holds beside these, shards of gradients included.
    """

    at: str
    where: str
    graph_bytes: int
    wrapper_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of graphs and wrapper together."""
        return self.graph_bytes + self.wrapper_bytes

    def __str__(self) -> str:
        """Returns the moment as text for messages."""
        return f"{self.at}, {self.where}" if self.where else self.at


def moments_of(
    calls: Sequence[GraphCall],
    regions: Sequence[RegionCall],
    graphs: Sequence[GraphBytes],
    shards: Shards,
    optimizer_bytes: int,
) -> list[StepMoment]:
    """Returns all moments of a step.

    Args:
        calls: The runs of a step, in the order of the forward.
        regions: The same runs, with the bytes of gradients that stay until the step's end.
        graphs: Bytes of each graph, indexed by `GraphCall.graph`.
        optimizer_bytes: Workspace of the optimizer's step.
    """
    live = _GraphsAt(calls, regions, graphs)
    if shards.tree is not None:
        found = [_with_graphs(m, live, _where(calls, m.place)) for m in _fsdp_moments(calls, shards)]
        at_end = StepMoment(OPTIMIZER, "", optimizer_bytes, shards.gradient_bytes)
        return [*found, at_end]
    buckets = shards.held.beside_bytes
    forward = [StepMoment(At.FORWARD, _where(calls, k), live.forward(k), buckets) for k in range(len(calls))]
    backward = [
        StepMoment(At.BACKWARD, _where(calls, k), live.backward(k), buckets) for k in reversed(range(len(calls)))
    ]
    at_end = StepMoment(OPTIMIZER, "", optimizer_bytes + shards.gradient_bytes, buckets)
    return [*forward, *backward, at_end]


def wrapper_bytes(calls: Sequence[GraphCall], shards: Shards) -> list[int]:
    """Returns the peak bytes of the wrapper during each run and until the next one, without gradients that graphs make."""
    most = [0 if shards.tree is not None else shards.held.beside_bytes] * len(calls)
    for moment in _fsdp_moments(calls, shards):
        place = min(moment.place, len(calls) - 1)
        most[place] = max(most[place], moment.beside_bytes)
    return most


def places_of(calls: Sequence[GraphCall], shards: Shards) -> list[int | None]:
    """Returns the index of FSDP2's group for each run; None for code between blocks, or if all groups are outer ones."""
    assert shards.tree is not None
    groups = shards.tree.groups
    inner = [k for k, group in enumerate(groups) if not group.is_outer]
    if all(call.block is None for call in calls):
        return [inner[0] if inner else None for _ in calls]
    num_blocks = 1 + max(call.block for call in calls if call.block is not None)
    return [None if call.block is None else len(groups) - num_blocks + call.block for call in calls]


def _fsdp_moments(calls: Sequence[GraphCall], shards: Shards) -> Iterator[FsdpMoment]:
    if shards.tree is not None:
        yield from fsdp_moments(shards.tree.groups, places_of(calls, shards))


def graph_bytes_of(planner: Planner, plan: Plan) -> GraphBytes:
    """Returns the bytes of a graph under a plan; if saved values wait on the host, its peaks are at most those returned."""
    option = option_of(planner, plan)
    if plan.offloaded:
        held_bytes = option.held_bytes - plan.offloaded_bytes
        return GraphBytes(plan.forward_peak_bytes, plan.peak_bytes, held_bytes, option.kept_output_bytes)
    backward_bytes = backward_peak_bytes(planner, plan)
    return GraphBytes(option.forward_peak_bytes, backward_bytes, option.held_bytes, option.kept_output_bytes)


class _GraphsAt:
    """Bytes that the graphs of a step hold before, during and after the run at each place."""

    def __init__(self, calls: Sequence[GraphCall], regions: Sequence[RegionCall], graphs: Sequence[GraphBytes]) -> None:
        self.runs = [graphs[call.graph] for call in calls]
        self.front = [0]
        for run in self.runs:
            self.front.append(self.front[-1] + run.held_bytes)
        self.later = [0]
        for region in reversed(regions):
            self.later.insert(0, self.later[0] + region.gradient_bytes)

    def forward(self, place: int) -> int:
        return self.front[place] + self.runs[place].forward_bytes

    def between(self, place: int) -> int:
        """Returns the bytes just before the backward at a place; its incoming gradient is there already."""
        return self.front[place + 1] + self._coming(place)

    def backward(self, place: int) -> int:
        return self.front[place] + self.runs[place].backward_bytes + self._coming(place)

    def behind(self, place: int) -> int:
        """Returns the bytes just after the backward at a place, without the gradients that it has made."""
        if place == len(self.runs):
            return 0  # the gradients that stayed belong to an outer group, whose moments count them
        kept = self.runs[place - 1].kept_output_bytes if place else 0
        return self.front[place] + kept + self.later[place + 1]

    def _coming(self, place: int) -> int:
        """Returns the bytes of gradients that stay until the end, and of incoming gradients beside outputs that are kept."""
        is_last = place == len(self.runs) - 1
        return self.later[place + 1] + self.runs[place].kept_output_bytes * (not is_last)


def _with_graphs(moment: FsdpMoment, live: _GraphsAt, where: str) -> StepMoment:
    at, place = moment.at, moment.place
    if at in (At.GATHER, At.COPY_OUT):
        graph_bytes = live.front[place]
    elif at is At.FORWARD:
        graph_bytes = live.forward(place)
    elif at in (At.GATHER_AGAIN, At.COPY_OUT_AGAIN, At.AHEAD):
        graph_bytes = live.between(place)
    elif at is At.BACKWARD:
        graph_bytes = live.backward(place)
    else:
        graph_bytes = live.behind(place) + moment.gradient_bytes
    return StepMoment(at, where, graph_bytes, moment.beside_bytes)


def _where(calls: Sequence[GraphCall], place: int) -> str:
    num_blocks = len({call.block for call in calls} - {None})
    if place == len(calls):
        return "parameters of no block"
    block = calls[place].block
    if block is not None:
        return f"block {block + 1} of {num_blocks}"
    if num_blocks:
        return "around the blocks"
    return "the model" if len(calls) == 1 else f"piece {place + 1} of {len(calls)}"
