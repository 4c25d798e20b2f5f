"""Kernels of the Triton code that Inductor emits: their number, the bytes that they move by family, the fusions that were refused.

A kernel is a node of Inductor's final scheduler that launches something: a fused kernel, or one call of an operator of a library.
Its family is the operator of the model, before decompositions, that most of its nodes come from.
Needs the fake device (`compile_remat._torch.fake_cuda`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch._inductor import ir, scheduler
from torch._inductor.graph import SubgraphLowering
from torch._inductor.virtualized import V

from compile_remat.inductor import fusion_guard

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
MOVES = (
    "_to_copy",
    "view",
    "_unsafe_view",
    "expand",
    "transpose",
    "permute",
    "slice",
    "clone",
    "t",
    "unsqueeze",
    "detach",
)
"""Operators that only convert or lay out: the family of a kernel is one of its other operators, if it has any."""


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Attributes:
        kind: ``product``, ``attention``, ``other`` (a library's), or ``fused`` (Inductor's own).
        family: The operator that most of its nodes come from.
        moved_bytes: Bytes that the kernel reads and writes, each buffer once.
    """

    kind: str
    family: str
    moved_bytes: int


@dataclass
class Traffic:
    """The kernels of the last forward and the last backward that were made, and the fusions refused for each."""

    kernels: dict[bool, list[Kernel]] = field(default_factory=dict)
    refused: dict[bool, Counter[str]] = field(default_factory=dict)

    def count(self, kind: str) -> int:
        """The number of kernels of a kind in both graphs."""
        return sum(kernel.kind == kind for graph in self.kernels.values() for kernel in graph)

    def families(self) -> dict[str, tuple[int, int]]:
        """Number of fused kernels and bytes that they move, by family; most bytes first."""
        counts, moved = Counter[str](), Counter[str]()
        for kernel in (k for graph in self.kernels.values() for k in graph if k.kind == "fused"):
            counts[kernel.family] += 1
            moved[kernel.family] += kernel.moved_bytes
        return {family: (counts[family], nbytes) for family, nbytes in moved.most_common()}


@contextmanager
def recorded(*, guarded: bool = True) -> Iterator[Traffic]:
    """Record the kernels of all code that is made in the body; without `guarded`, no fusion is refused for the plan's sake."""
    found = Traffic()
    codegen = scheduler.Scheduler.codegen

    def recording(self: Any) -> object:
        if isinstance(V.graph, SubgraphLowering):  # counted below, once for each call
            return codegen(self)
        nodes, is_backward = list(self.nodes), V.graph.is_backward
        own = list(_kernels(nodes))
        code = codegen(self)
        called = [node.node.subgraph.graph for node in nodes if isinstance(node.node, ir.InvokeSubgraph)]
        for graph in called:
            with V.set_graph_handler(graph):  # by which sizes of buffers are found
                own += _kernels(graph.scheduler.nodes)
        found.kernels[is_backward] = own
        return code

    decisions = {
        name: staticmethod(_deciding(found, name, guarded)) for name in ("can_fuse_horizontal", "can_fuse_vertical")
    }
    with (
        mock.patch.object(scheduler.Scheduler, "codegen", recording),
        mock.patch.multiple(fusion_guard.GuardedChoices, **decisions),
    ):
        yield found


def _deciding(found: Traffic, name: str, guarded: bool) -> Any:
    ours, inductors = (getattr(owner, name) for owner in (fusion_guard.GuardedChoices, fusion_guard.InductorChoices))

    def decide(sched: Any, first: Any, second: Any, score: int) -> bool:
        allowed = ours(sched, first, second, score) if guarded else inductors(sched, first, second, score)
        if not allowed and inductors(sched, first, second, score):
            order = fusion_guard._order_of(sched)
            is_first = order.limit_bytes is None and name == "can_fuse_horizontal"
            is_pulled = is_first and order.pulls_over_extern(sched, first, second)
            reason = "moves ahead of a library's kernel" if is_pulled else "raises memory"
            found.refused.setdefault(V.graph.is_backward, Counter())[reason] += 1
        return bool(allowed)

    return decide


def _kernels(nodes: Any) -> Iterator[Kernel]:
    for node in nodes:
        if not isinstance(node, scheduler.NopKernelSchedulerNode) and not isinstance(
            getattr(node, "node", None), ir.MultiOutput | ir.InvokeSubgraph
        ):
            kind = _kind(node.node) if node.is_extern() else "fused"
            yield Kernel(kind, _family(node), sum(map(int, _accessed(node))))


def _accessed(node: Any) -> list[int]:
    return [
        nbytes
        for which in (
            {"include_reads": True, "include_writes": False},
            {"include_reads": False, "include_writes": True},
        )
        for nbytes in node.get_read_write_buffer_accesses(**which).values()
    ]


def _kind(node: Any) -> str:
    name = str(getattr(node, "op_overload", None) or getattr(node, "python_kernel_name", None) or "")
    words = name.replace("::", ".").split(".")
    if any(word in PRODUCTS for word in words):
        return "product"
    return "attention" if "attention" in name else "other"


def _family(node: Any) -> str:
    """The operator that most nodes come from; ties go to the first in alphabetical order."""
    origins = {origin for part in node.get_nodes() if part.node is not None for origin in part.node.origins}
    names = Counter(_operator(origin) for origin in origins)
    own = {name: count for name, count in names.items() if name not in MOVES} or dict(names)
    return min(own, key=lambda name: (-own[name], name), default="unknown")


def _operator(origin: Any) -> str:
    source = origin.meta.get("original_aten") or origin.target
    return str(getattr(source, "_opname", None) or getattr(source, "__name__", source))
