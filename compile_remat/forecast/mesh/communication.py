"""Time of the collectives of a rank's step, and the share of it that kernels do not hide."""

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
    """Returns the links of a cluster of such devices; None if not even the link inside a node is known.

    Raises:
        DeviceError: `network` is not known.
    """
    between = network or device.network_link
    if device.node_link is None:
        if network is not None:
            load_link(network)
        return None
    return Links(load_link(device.node_link), None if between is None else load_link(between), layout.node_size)


def times_in_graph(graph: fx.Graph, links: Links | None) -> tuple[tuple[str, int], ...]:
    """Returns the node name and the time of each collective of a graph; 0 for a wait, and for all if `links` is None.

    Raises:
        RematError: The graph has a collective that is not known.
    """
    found = []
    for collective in collectives_of(graph):
        if collective.operator == WAIT or links is None:
            found.append((collective.name, 0))
            continue
        kind = _KINDS.get(collective.operator.removesuffix("_").removesuffix("_coalesced"))
        if kind is None:
            raise RematError(
                f"the collective {collective.operator} has no known time; there are formulas for {', '.join(_KINDS)}."
            )
        found.append((collective.name, links.time_ns(kind, collective.nbytes, collective.ranks)))
    return tuple(found)


@dataclass(frozen=True)
class Work:
    """One run of a graph, in nanoseconds.

    Attributes:
        forward_ns: Kernels of the forward, and the collectives inside, for which the forward waits.
        backward_ns: The same for the backward, recomputation included.
        gather_ns: Time in which FSDP2 gathers the parameters before the forward.
        gather_again_ns: Time in which it gathers them before the backward; 0 if they have stayed gathered.
        reduce_ns: Time in which DDP or FSDP2 reduces the gradients after the backward.
    """

    forward_ns: int
    backward_ns: int
    gather_ns: int = 0
    gather_again_ns: int = 0
    reduce_ns: int = 0


def with_fsdp(
    work: Sequence[Work], calls: Sequence[GraphCall], shards: Shards, layout: MeshLayout, links: Links
) -> list[Work]:
    """Returns `work` with FSDP2's collectives: a block's around its own run, the outer group's around the whole step."""
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
    """Returns `work` with DDP's all-reduce after each backward: torch cuts the graph at the buckets.

    Args:
        gradient_bytes: Bytes of the gradients of each run.
    """
    return [
        replace(each, reduce_ns=links.time_ns(CollectiveKind.ALL_REDUCE, nbytes, layout.data_ranks))
        for each, nbytes in zip(work, gradient_bytes, strict=True)
    ]


def step_time_ns(work: Sequence[Work]) -> int:
    """Returns the time of a step in which one collective runs beside one kernel.

    A gather begins with the run before its own (FSDP2 gathers one group ahead), a reduction at the end of its backward; both
    wait for the collectives before them.
    """
    forward = [(each.gather_ns, each.forward_ns, 0) for each in work]
    backward = [(each.gather_again_ns, each.backward_ns, each.reduce_ns) for each in reversed(work)]
    compute, network = _after(forward, 0, 0)
    return max(_after(backward, compute, network))


def _after(runs: Sequence[tuple[int, int, int]], compute: int, network: int) -> tuple[int, int]:
    """Returns the times at which the last kernel and the last collective of these runs end.

    Args:
        runs: Nanoseconds to gather, to run and to reduce, of each run.
        compute: Time at which kernels may start.
        network: Time at which collectives may start.
    """
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
