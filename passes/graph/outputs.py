"""What a joint graph returns, and which steps read the gradients that come in for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from compile_remat.passes.graph.node_drafts import Draft, DraftGraph


def mark_outputs(graph: DraftGraph) -> None:
    """Values are outputs where the forward returns them, steps where either returns them."""
    for draft in graph.drafts_of(*graph.joint.fwd_outputs):
        draft.is_output = True
    for draft in graph.drafts_of(*graph.joint.bwd_outputs):
        draft.is_output |= draft.in_backward


def gradient_readers(graph: DraftGraph, step_of: Mapping[Draft, int]) -> dict[fx.Node, tuple[int, ...]]:
    """For roots of outputs, the steps that read the gradient that comes in: tangents have their outputs' order and sizes."""
    closure = graph.joint.info.tangents_closure
    inputs = graph.joint.module.graph.find_nodes(op="placeholder")  # in the order of the graph
    readers: dict[fx.Node, set[int]] = {n: set() for n in inputs if n in closure}
    for draft, step in step_of.items():
        for tangent in readers.keys() & graph.roots_of(*draft.node.all_input_nodes):
            readers[tangent].add(step)
    open_outputs = [node for node in graph.joint.fwd_outputs if isinstance(node.meta.get("val"), torch.Tensor)]
    found: dict[fx.Node, tuple[int, ...]] = {}
    for tangent, steps in readers.items():
        output = next((n for n in open_outputs if _has_size_of(n, tangent)), None)
        if output is None:
            continue
        del open_outputs[: open_outputs.index(output) + 1]
        found |= {root: tuple(sorted(steps)) for root in graph.roots_of(output) if steps}
    return found


def _has_size_of(node: fx.Node, other: fx.Node) -> bool:
    return str(node.meta["val"].shape) == str(other.meta["val"].shape)
