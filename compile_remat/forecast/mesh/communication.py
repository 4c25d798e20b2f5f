"""What the collectives of a rank's step take, and how much of it kernels do not hide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from compile_remat._torch.ranks.collectives import WAIT, collectives_of
from compile_remat._torch.ranks.wrappers import FsdpGroup
from compile_remat.cost_models import CollectiveKind, Device, Links, load_link
from compile_remat.errors import RematError
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.rank_trace import GraphCall
from compile_remat.forecast.mesh.shards import Shards

_KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "shard_dim_alltoall": CollectiveKind.ALL_TO_ALL,
}


def links_of(device: Device, layout: MeshLayout, network: str | None = None) -> Links | None:
    """The links of a cluster of such devices; None where not even those of a node are known.

    Raises:
        DeviceError: There is no such network.
    """
    between = network or device.network_link
    if device.node_link is None:
        if network is not None:
            load_link(network)
        return None
    return Links(load_link(device.node_link), None if between is None else load_link(between), layout.node_size)


def times_in_graph(graph: fx.Graph, links: Links | None) -> tuple[tuple[str, int], ...]:
    """The time of each collective of a graph, by its node's name; a node that waits for one costs nothing of its own.

    Raises:
        RematError: It has a collective that is not known.
    """
    found = []
    for collective in collectives_of(graph):
        if collective.operator == WAIT or links is None:
            found.append((collective.name, 0))
            continue
        kind = _KINDS.get(collective.operator.removesuffix("_").removesuffix("_coalesced"))
        if kind is None:
            raise RematError(f"the collective {collective.operator} has no price; known are {', '.join(_KINDS)}.")
        found.append((collective.name, links.time_ns(kind, collective.nbytes, collective.ranks)))
    return tuple(found)


@dataclass(frozen=True)
class Work:
    """One run of a graph, in nanoseconds.

    Attributes:
        forward_ns: Its kernels and the collectives inside, which it waits for.
        backward_ns: The same, recomputation included.
        gather_ns: FSDP2 gathers its parameters before it.
        gather_again_ns: The same before the backward; 0 where they have stayed.
        reduce_ns: FSDP2 reduces its gradients behind the backward.
    """

    forward_ns: int
    backward_ns: int
    gather_ns: int = 0
    gather_again_ns: int = 0
    reduce_ns: int = 0


def with_fsdp(
    work: Sequence[Work], calls: Sequence[GraphCall], shards: Shards, layout: MeshLayout, links: Links
) -> list[Work]:
    """The same with FSDP2's collectives: a block's around its own run, those of the model's own group around the whole step."""
    assert shards.tree is not None
    groups = shards.tree.groups
    num_blocks = 1 + max((call.block for call in calls if call.block is not None), default=-1)
    of_blocks, of_model = groups[len(groups) - num_blocks :], groups[: len(groups) - num_blocks]
    found = [
        each if call.block is None else _with_group(each, of_blocks[call.block], layout, links)
        for each, call in zip(work, calls, strict=True)
    ]
    for group in of_model:
        whole = _with_group(Work(0, 0), group, layout, links)
        found[0] = replace(
            found[0],
            gather_ns=found[0].gather_ns + whole.gather_ns,
            reduce_ns=found[0].reduce_ns + whole.reduce_ns,
        )
        found[-1] = replace(found[-1], gather_again_ns=found[-1].gather_again_ns + whole.gather_again_ns)
    return found


def _with_group(work: Work, group: FsdpGroup, layout: MeshLayout, links: Links) -> Work:
    gather_ns = links.time_ns(CollectiveKind.ALL_GATHER, group.gathered_bytes, layout.data_ranks)
    reduce_ns = links.time_ns(CollectiveKind.REDUCE_SCATTER, group.reduced_bytes, layout.data_ranks)
    return replace(
        work,
        gather_ns=gather_ns,
        gather_again_ns=0 if group.stays or group.is_outer else gather_ns,
        reduce_ns=reduce_ns,
    )


def with_ddp(work: Sequence[Work], gradient_bytes: Sequence[int], layout: MeshLayout, links: Links) -> list[Work]:
    """The same with DDP's all-reduce behind each backward: torch cuts the graph at the buckets.

    Args:
        gradient_bytes: Of each run.
    """
    return [
        replace(each, reduce_ns=links.time_ns(CollectiveKind.ALL_REDUCE, nbytes, layout.data_ranks))
        for each, nbytes in zip(work, gradient_bytes, strict=True)
    ]


def step_time_ns(work: Sequence[Work]) -> int:
    """How long a step takes in which one collective runs beside one kernel.

    A gather begins when the run before its own does (FSDP2 gathers one group ahead), a reduction when its backward has ended; both
    wait for the collectives before them.
    """
    forward = [(each.gather_ns, each.forward_ns, 0) for each in work]
    backward = [(each.gather_again_ns, each.backward_ns, each.reduce_ns) for each in reversed(work)]
    compute, network = _after(forward, 0, 0)
    return max(_after(backward, compute, network))


def _after(runs: Sequence[tuple[int, int, int]], compute: int, network: int) -> tuple[int, int]:
    """When the last kernel and the last collective of these runs have ended: each gathers, runs and reduces."""
    network = max(network, compute) + runs[0][0] if runs[0][0] else network
    is_gathered_at = network if runs[0][0] else compute
    for k, (_, run_ns, reduce_ns) in enumerate(runs):
        begun = max(compute, is_gathered_at)
        ahead_ns = runs[k + 1][0] if k + 1 < len(runs) else 0
        if ahead_ns:
            network = max(network, begun) + ahead_ns
        is_gathered_at = network if ahead_ns else 0
        compute = begun + run_ns
        if reduce_ns:
            network = max(network, compute) + reduce_ns
    return compute, network
