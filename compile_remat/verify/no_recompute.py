"""The plan that recomputes nothing, the expected result of `check`: it saves every forward value that the backward reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat.inductor.entry import CustomPartitionerFn
from compile_remat.inductor.install import joint_keywords
from compile_remat.passes.graph.pins import must_be_saved


class NoRecomputePartitioner(CustomPartitionerFn):
    """Splits a joint graph without any recompute, and keeps facts that only the joint graph has.

    Attributes:
        ran: True if there was a joint graph; inference has none.
        saved_bytes: Bytes of the saved values' storages, an upper bound, since views are counted separately.
        mutated: Positions of the arguments that the graph writes into; None if unknown.
        epsilon: Machine epsilon of the coarsest floating-point type of 16 bits or more in the graph.
        communicates: True if the graph has collectives, in which other ranks have to take part.
    """

    def __init__(self) -> None:
        self.ran = False
        self.saved_bytes = 0
        self.mutated: frozenset[int] | None = frozenset()
        self.epsilon = 0.0
        self.communicates = False

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph; Inductor calls this for the bodies of nested regions first and for the whole graph last."""
        keywords = joint_keywords(kwargs)
        joint = joint_graph.prepare(gm, **keywords)
        self.ran = True
        self.mutated = joint_graph.mutated_arguments(joint)
        values = [n.meta.get("val") for n in joint.module.graph.nodes]
        self.epsilon = max([self.epsilon, *(_epsilon(v) for v in values)])
        self.communicates |= any(_communicates(n) for n in joint.module.graph.nodes)
        if not joint.has_backward:
            return joint_graph.torch_partition(gm, joint_inputs, **keywords)
        saved = read_by_backward(joint)
        self.saved_bytes += sum(sizes.storage_nbytes(n.meta.get("val")) for n in saved)
        return joint_graph.extract_modules(joint, dict.fromkeys([*joint.info.inputs, *saved]))

    def uuid(self) -> object:
        """Returns a constant, since the graphs of this partitioner are compiled without the partition cache."""
        return "compile_remat: recompute nothing"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoRecomputePartitioner:
        """Returns this object: Inductor copies its options, and the facts must stay in one object."""
        return self


def read_by_backward(joint: joint_graph.Joint) -> list[fx.Node]:
    """Returns in graph order the forward's values that the backward reads and the values that must never be computed twice."""
    found = set(must_be_saved(joint))
    stack, seen = list(joint.bwd_outputs), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if joint.info.is_required_fw(node) and node not in joint.info.inputs and _is_saveable(node):
            found.add(node)
        else:
            stack.extend(node.all_input_nodes)
    symbols = (n for n in joint.module.graph.nodes if joint.info.is_required_fw(n) and n not in joint.info.inputs)
    found.update(n for n in symbols if joint_graph.is_saveable_symbol(n))
    return [n for n in joint.module.graph.nodes if n in found]


def _is_saveable(node: fx.Node) -> bool:
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return node.op == "call_function" and (is_tensor or joint_graph.is_saveable_symbol(node))


def _epsilon(value: object) -> float:
    """Returns the spacing of the tensor's numbers at 1; 0 for integers, and for 8-bit types, which are quantised."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return float(torch.finfo(value.dtype).eps) if value.dtype.itemsize > 1 else 0.0


def _communicates(node: fx.Node) -> bool:
    return "c10d" in getattr(node.target, "namespace", "")
