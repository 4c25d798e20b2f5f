"""A training step of one rank, traced without data: its graphs, each one once, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from compile_remat._torch.fake import NumbersAreZero, fake_tensors
from compile_remat._torch.operators import tree_leaves
from compile_remat._torch.ranks.fake_group import fake_mesh, has_process_group
from compile_remat._torch.ranks.wrappers import is_spread, local_nbytes
from compile_remat._util.progress import Advance
from compile_remat.cost_models import Device
from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import Traced, looked_at, refuse, show_graphs, with_device_attention
from compile_remat.forecast.mesh.blocks import blocks_of
from compile_remat.forecast.mesh.graph_parts import Part, parts_of, parts_under_ddp
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.mixed_precision import in_dtype
from compile_remat.forecast.mesh.shards import Shards, shards_of
from compile_remat.planning.joint_problem import JointModule


@dataclass(frozen=True)
class GraphCall:
    """One run of a graph in a step.

    Attributes:
        graph: Index of the graph among the different graphs.
        block: Number of the block; None for a part between blocks.
    """

    graph: int
    block: int | None = None


@dataclass(frozen=True)
class RankTrace:
    """A step of one rank.

    Attributes:
        graphs: The different graphs.
        names: First block, or piece between DDP's buckets, with each graph; empty for a part between blocks.
        calls: Runs of the graphs, in the order of the forward.
        shards: Bytes that the rank holds beside the graphs.
        input_bytes: Bytes of the model's inputs, and of their copies in the dtype of the forward.
    """

    graphs: tuple[Traced, ...]
    names: tuple[str, ...]
    calls: tuple[GraphCall, ...]
    shards: Shards
    input_bytes: int


TimesOf = Callable[[fx.Graph], tuple[tuple[str, int], ...]]
"""Returns the times of a graph's collectives, by the nodes' names."""


def trace_rank(
    builder: Builder,
    device: Device,
    layout: MeshLayout,
    times_of: TimesOf,
    advance: Advance = lambda text="", count=1: None,
) -> RankTrace:
    """Build and trace the step of rank 0 without allocating memory.

    Args:
        times_of: Prices collectives; called while the mesh's process groups exist.

    Raises:
        ConfigError: The builder, a size or the mesh is invalid.
        RematError: The model breaks into several graphs, needs no gradient, or cannot be traced without data.
    """
    if has_process_group():
        raise ConfigError("mesh: this process is a rank of a process group already; plan in another process.")
    with fake_mesh({"dp": layout.dp, "tp": layout.tp}) as mesh:
        with fake_tensors(builder.torch_dtype), NumbersAreZero():
            model, inputs = replace(builder, mesh=mesh).build()
        if layout.tp > 1 and not any(map(is_spread, model.parameters())):
            raise ConfigError(
                f"tp = {layout.tp}: the builder {builder.name} shards no parameter. It has to take `mesh` and apply "
                "tensor parallelism over mesh['tp'] itself; see docs/guides/planning-hardware.md."
            )
        blocks = blocks_of(model) if layout.shard == "fsdp2" else {}
        if layout.shard == "fsdp2" and not blocks:
            raise ConfigError(
                f"shard = 'fsdp2': {builder.name} has no list of blocks (nn.ModuleList); 'fsdp2-whole' needs none."
            )
        shards = shards_of(model, blocks, layout, mesh, "cpu" if device.name == "cpu" else "cuda")
        input_bytes = _nbytes(inputs)
        if layout.forward_dtype is not None:
            inputs, copied_bytes = in_dtype(model, inputs, layout.forward_dtype)
            input_bytes += copied_bytes
        advance(f"tracing {builder.name}")
        is_ddp = layout.shard == "ddp" and layout.dp > 1 and layout.tp == 1

        def cut(gm: fx.GraphModule, given: Sequence[Any]) -> list[Part]:
            return parts_under_ddp(gm, given) if is_ddp else parts_of(gm, given, tuple(blocks))

        parts = _seen(model, inputs, cut, builder.name, device)
        graphs, names, calls = _distinct(parts, tuple(blocks), builder.name, device)
        graphs = [replace(graph, times_ns=times_of(graph.copied().classified().module.graph)) for graph in graphs]
        if is_ddp and len(calls) > 1:
            places = [call.graph for call in calls]
            names = [f"piece {1 + places.index(graph)}" for graph in range(len(graphs))]
    return RankTrace(tuple(graphs), tuple(names), tuple(calls), shards, input_bytes)


@dataclass(frozen=True)
class _SeenPart:
    part: Part
    key: tuple[object, ...]
    seen: JointModule | None


def _seen(
    model: nn.Module,
    inputs: Sequence[Any],
    cut: Callable[[fx.GraphModule, Sequence[Any]], list[Part]],
    name: str,
    device: Device,
) -> list[_SeenPart]:
    """Returns the parts of the model's graph that need a gradient; the first part with a key also has its joint graph."""
    found: list[_SeenPart] = []
    num_graphs = 0

    def see(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        nonlocal num_graphs
        known = {part.key for part in found}
        parts = [part for part in cut(gm, example_inputs) if part.needs_gradient]
        num_graphs += bool(parts)
        for part in parts:
            key = part.key()
            found.append(_SeenPart(part, key, None if key in known else looked_at(part.module, part.inputs)))
            known.add(key)

    show_graphs(model, inputs, see, name, device)
    if num_graphs != 1:
        refuse(num_graphs, name)
    return found


def _distinct(
    parts: Sequence[_SeenPart], blocks: tuple[str, ...], name: str, device: Device
) -> tuple[list[Traced], list[str], list[GraphCall]]:
    graphs: list[Traced] = []
    names: list[str] = []
    calls: list[GraphCall] = []
    numbers: dict[tuple[object, ...], int | None] = {}
    for seen in parts:
        part = seen.part
        if seen.key not in numbers:
            given = seen.seen
            has_backward = given is not None and given.copied().classified().has_backward
            numbers[seen.key] = len(graphs) if has_backward else None
            if given is not None and has_backward:
                own = [t for t in part.inputs if isinstance(t, nn.Parameter)]
                trained = [t for t in own if t.requires_grad]
                others = [t for t in part.inputs if not isinstance(t, nn.Parameter)]
                given = with_device_attention(device, given)
                graphs.append(Traced(name, given, _nbytes(own), _nbytes(trained), _nbytes(others)))
                names.append(part.block)
        number = numbers[seen.key]
        if number is not None:
            calls.append(GraphCall(number, blocks.index(part.block) if part.block else None))
    if not calls:
        refuse(0, name)
    missing = set(range(len(blocks))) - {call.block for call in calls}
    if missing:
        raise RematError(
            f"{name}: block {blocks[min(missing)]} is not called as a module, or needs no gradient: FSDP2 cannot be put "
            "around it. 'fsdp2-whole' shards the model as a whole."
        )
    return graphs, names, calls


def _nbytes(values: Sequence[Any]) -> int:
    return sum(local_nbytes(t) for value in values for t in tree_leaves(value) if isinstance(t, torch.Tensor))
