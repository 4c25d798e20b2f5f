"""Scheduler nodes without a model, and the two passes over them: the fusion guard, and the order of kernels.

`Scheduler` has rows of recomputed layers, each with a convolution, its backward, the pointwise kernels around them and a bias
gradient, and one mask that every layer reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from compile_remat.inductor.fusion_guard import PlannedOrder
from compile_remat.inductor.kernel_order import KernelSequence

PAIRWISE = 64
"""Inductor compares one reader of a buffer with so many that follow (``max_fusion_buffer_group_pairwise_attempts``)."""

BYTES = {"small": 16, "large": 1 << 20}


@dataclass(frozen=True)
class Dep:
    """A read or write of a buffer."""

    name: str


@dataclass(frozen=True)
class Buffer:
    """A buffer that a node makes, and the buffers that it changes in place."""

    name: str
    mutations: tuple[str, ...] = ()
    defining_op: Any = None

    def get_name(self) -> str:
        return self.name

    def get_mutations(self) -> tuple[str, ...]:
        return self.mutations


class Accesses:
    """The buffers that a node reads and writes."""

    def __init__(self, reads: Iterable[str], writes: Iterable[str]) -> None:
        self.reads, self.writes = {Dep(name) for name in reads}, {Dep(name) for name in writes}


class Sizes:
    """A scheduler that is asked for bytes alone: those in `nbytes`, else 1000."""

    def __init__(self, nbytes: Mapping[str, int], nodes: Sequence[Node] = ()) -> None:
        self.nbytes, self.nodes = nbytes, nodes

    def dep_size_hint(self, dep: Dep) -> int:
        return self.nbytes.get(dep.name, 1000)


class Node:
    """A node of the scheduler.

    Args:
        place: Its place in the scheduler's order.
        rank: Its place in the plan.
        scatters_into: The buffer that the node changes in place: its output is that buffer with other elements.
        sliced: The buffer of which the node reads a part.
    """

    def __init__(
        self,
        place: int,
        reads: str,
        writes: str,
        rank: object = None,
        *,
        is_extern: bool = False,
        overload: object = None,
        scatters_into: str = "",
        sliced: str = "",
        scheduler: Any = None,
    ) -> None:
        self.scheduler, self.name = scheduler, f"op{place}"
        self.min_order = self.max_order = place
        self.read_writes = Accesses(reads.split(), writes.split())
        self.unmet_dependencies = list(self.read_writes.reads)
        self.extern, self.mutations, self.sliced = is_extern, tuple(scatters_into.split()), sliced.split()
        device = torch.device("cuda")
        # the part of Inductor's IR that the order of kernels reads
        self.node: Any = SimpleNamespace(origin_node=rank, origins=(), op_overload=overload, get_device=lambda: device)

    def get_name(self) -> str:
        return self.name

    def get_nodes(self) -> list[Node]:
        return [self]

    def get_outputs(self) -> list[Buffer]:
        return [Buffer(dep.name, self.mutations, self) for dep in self.read_writes.writes]

    def is_extern(self) -> bool:
        return self.extern

    def is_template(self) -> bool:
        return False

    def can_inplace(self, read: Dep) -> bool:
        return read.name not in self.sliced


class Joined(Node):
    """Nodes that have become one kernel."""

    def __init__(self, *nodes: Node) -> None:
        self.parts = [part for node in nodes for part in node.get_nodes()]
        self.min_order = min(part.min_order for part in self.parts)
        self.max_order = max(part.max_order for part in self.parts)

    def get_nodes(self) -> list[Node]:
        return self.parts


class Scheduler:
    """Rows of recomputed layers, `count` nodes in all."""

    def __init__(self, count: int) -> None:
        self.nodes: list[Node] = []
        self.name_to_buf: dict[str, Buffer] = {}
        self._add(0, "primals_1", "mask")
        for layer in range((count - 1) // len(LAYER)):
            first = len(self.nodes)
            for rank, reads, writes, overload in LAYER:
                names = [text.format(layer, layer + 1) for text in (reads, writes)]
                self._add(first + rank, *names, overload)
        self.name_to_fused_node: dict[str, Node] = {node.name: node for node in self.nodes}

    def _add(self, rank: int, reads: str, writes: str, overload: object = None) -> None:
        node = Node(
            len(self.nodes), reads, writes, rank, is_extern=overload is not None, overload=overload, scheduler=self
        )
        node.unmet_dependencies = [dep for dep in node.read_writes.reads if dep.name in self.name_to_buf]
        self.nodes.append(node)
        self.name_to_buf.update((buffer.name, buffer) for buffer in node.get_outputs())

    def dep_size_hint(self, dep: Dep) -> int:
        return BYTES["small" if dep.name.startswith("bias") else "large"]

    def candidates(self) -> Iterable[tuple[Node, Node]]:
        """The pairs of pointwise kernels that read one buffer, as Inductor's ``get_possible_fusions`` lists them."""
        readers: dict[str, list[Node]] = {}
        for node in self.nodes:
            if not node.is_extern():
                for dep in node.read_writes.reads:
                    readers.setdefault(dep.name, []).append(node)
        for group in readers.values():
            for k, first in enumerate(group):
                yield from ((first, second) for second in group[k + 1 : k + PAIRWISE])


CONVOLUTION = torch.ops.aten.convolution.default
BACKWARD = torch.ops.aten.convolution_backward.default
LAYER: tuple[
    tuple[int, str, str, object], ...
] = (  # rank in the plan, reads, writes, operator; 0 and 1: this layer, the next
    (1, "saved{0} mask", "norm{0}", None),
    (2, "norm{0} primals_2", "conv{0}", CONVOLUTION),
    (3, "conv{0} mask", "act{0}", None),
    (0, "grad{0} drop{0} mask", "masked{0}", None),  # put off: the plan has it before the recomputation
    (4, "masked{0} act{0} primals_3", "back{0} weight{0}", BACKWARD),
    (5, "masked{0}", "bias{0}", None),
    (6, "back{0} conv{0}", "turned{0}", None),
    (7, "turned{0} norm{0}", "scaled{0}", None),
    (8, "turned{0} scaled{0} mask", "grad{1}", None),
)


def returned(scheduler: Scheduler) -> list[str]:
    """The gradients of weights."""
    return [name for name in scheduler.name_to_buf if name.startswith(("weight", "bias"))]


def run_guard(scheduler: Scheduler) -> int:
    """Ask the fusion guard for every candidate, and join what it allows; returns how many were joined."""
    order, count = PlannedOrder(scheduler, returned(scheduler)), 0
    joined = scheduler.name_to_fused_node
    for first, second in scheduler.candidates():
        if joined[first.name] is first and joined[second.name] is second:
            if not order.pulls_over_extern(scheduler, first, second) and order.keeps_memory(joined, first, second):
                joined[first.name] = joined[second.name] = Joined(first, second)
                count += 1
    return count


def run_order(scheduler: Scheduler) -> int:
    """Order the kernels; returns how many were moved."""
    return KernelSequence(scheduler.nodes, returned(scheduler), range(len(scheduler.nodes))).move_up()
