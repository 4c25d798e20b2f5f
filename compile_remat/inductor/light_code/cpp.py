"""Inductor's C++ backend without kernels.

Private names of ``torch._inductor.codegen.cpp``, same in 2.11 to 2.15: ``CppScheduling`` and its ``kernel_group``,
``kernel_proxy_cls``, ``codegen_node``, ``flush``; ``CppKernelProxy`` and its ``codegen_nodes``, ``codegen_loops``, ``loop_nest``;
``OuterLoopFusedSchedulerNode.outer_loop_fusion_depth``, ``LoopNest.build``, ``TilingSelect._select_tiling_indices``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_module, private_name
from compile_remat.inductor.light_code.kernels import Kernels, LightKernel, name_kernel

if TYPE_CHECKING:
    from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling
else:
    CppKernelProxy = private_name("torch._inductor.codegen.cpp", "CppKernelProxy")
    CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
cpp = private_module("torch._inductor.codegen.cpp")
V = private_name("torch._inductor.virtualized", "V")

TILING_FACTOR = 16
"""Any number of lanes: which loop is cut into tiles does not depend on it but for loops with fewer elements."""


class LightCpp(CppScheduling):
    """Inductor's C++ backend, without the text of kernels.

    Args:
        kernels: Gets the names of kernels and the nodes that they run.
        is_apart: Whether each kernel is called on its own where something can be freed after it, as by `SeparateKernels`.
    """

    def __init__(self, scheduler: Any, kernels: Kernels, is_apart: bool) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self.kernels, self.is_apart = kernels, is_apart

    def ready_to_flush(self) -> bool:
        """Whether the kernels so far are called now."""
        is_ready: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_ready or (self.is_apart and bool(V.graph.scheduler.buffer_names_to_free))

    def codegen_node(self, node: Any) -> None:
        """Decide about the buffers of one fused kernel."""
        if isinstance(node, cpp.OuterLoopFusedSchedulerNode):
            self.kernel_proxy_cls = partial(LightLoops, node.outer_loop_fusion_depth)  # type: ignore[assignment]
            super().codegen_node(node)  # type: ignore[no-untyped-call]
            return
        group, nodes = self.kernel_group, list(node.get_nodes())
        LightKernel(group.args).take_in(nodes)
        group.scheduled_nodes += nodes
        if group.get_num_args() > CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM:
            self._set_flush_status(True)  # type: ignore[no-untyped-call]

    def define_kernel(self, src_code: str, nodes: list[Any], kernel_args: Any = None) -> str:
        """A name for a kernel in the wrapper, which stands for no code."""
        return name_kernel(self.kernels, nodes)

    def codegen_comment(self, *args: Any, **kwargs: Any) -> None:
        """No comments: they name the origins of all nodes."""


class LightLoops(CppKernelProxy):
    """Loops of one kernel inside of outer loops that it shares with others.

    Inductor decides which buffers are local to the shared loops, and joins them only where all kernels cut them into the same
    tiles.  Mostly none does; where one might, its own code finds out.

    Args:
        depth: How many loops are shared.
    """

    def __init__(self, depth: int, kernel_group: Any) -> None:
        super().__init__(kernel_group)  # type: ignore[no-untyped-call]
        self.depth = depth

    def codegen_nodes(self, nodes: list[Any]) -> None:
        """Decide about the buffers, and note the loops."""
        sizes = [node.group[1] for node in nodes]
        tiled = cpp.TilingSelect()._select_tiling_indices([node._body for node in nodes], sizes, TILING_FACTOR)
        loops, reduced = max(sizes, key=lambda each: len(each[1]))
        if any(k % (len(loops) + len(reduced)) < self.depth for k in tiled):
            super().codegen_nodes(nodes)  # type: ignore[no-untyped-call]
            return
        LightKernel(self.kernel_group.args).take_in(nodes)
        self.set_ranges(loops, reduced)  # type: ignore[no-untyped-call]
        self.loop_nest = cpp.LoopNest.build(self)
        self.loop_nest.set_kernel(self)

    def codegen_loops(self, code: Any, worksharing: Any) -> None:
        """No text."""
