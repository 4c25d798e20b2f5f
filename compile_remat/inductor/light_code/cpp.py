"""Inductor's C++ backend without kernel code.

Private names of ``torch._inductor.codegen.cpp``, same in 2.11 to 2.15: ``CppScheduling`` and its ``kernel_group``,
``kernel_proxy_cls``, ``codegen_node``, ``flush``; ``CppKernelProxy`` and its ``codegen_nodes``, ``codegen_loops``, ``loop_nest``;
``OuterLoopFusedSchedulerNode.outer_loop_fusion_depth``, ``LoopNest.build``, ``TilingSelect._select_tiling_indices``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from compile_remat._torch.version import private_module, private_name
from compile_remat.inductor.light_code.kernels import Kernels, LightKernel, call_kernel, name_kernel
from compile_remat.inductor.light_code.loop_bodies import give_own_bodies, nodes_in

if TYPE_CHECKING:
    from torch._inductor.codegen.cpp import CppKernelProxy, CppScheduling
else:
    CppKernelProxy = private_name("torch._inductor.codegen.cpp", "CppKernelProxy")
    CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
cpp = private_module("torch._inductor.codegen.cpp")
V = private_name("torch._inductor.virtualized", "V")

FloorDiv = private_name("torch.utils._sympy.functions", "FloorDiv")
ModularIndexing = private_name("torch.utils._sympy.functions", "ModularIndexing")


class LightCpp(CppScheduling):
    """Inductor's C++ backend, without the text of kernels.

    Args:
        kernels: Receives the name of each kernel and the nodes that it runs.
        is_apart: True to end a function at each kernel after which a buffer can be freed, as `SeparateKernels` does.
    """

    def __init__(self, scheduler: Any, kernels: Kernels, is_apart: bool) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self.kernels, self.is_apart = kernels, is_apart

    def ready_to_flush(self) -> bool:
        """Returns whether the kernels collected so far are called now."""
        is_ready: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_ready or (self.is_apart and bool(V.graph.scheduler.buffer_names_to_free))

    def codegen_node(self, node: Any) -> None:
        """Decide about the buffers of one fused kernel."""
        if isinstance(node, cpp.OuterLoopFusedSchedulerNode):
            self.kernel_proxy_cls = partial(LightLoops, node.outer_loop_fusion_depth)  # type: ignore[assignment]
            super().codegen_node(node)
            return
        group, nodes = self.kernel_group, list(node.get_nodes())
        LightKernel(group.args).take_in(nodes)
        group.scheduled_nodes += nodes
        buffers = len(group.args.input_buffers) + len(group.args.output_buffers)
        if buffers > CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM < group.get_num_args():
            self._set_flush_status(True)

    def codegen_template(self, *args: Any, **kwargs: Any) -> Any:
        """Make a kernel from a template and the nodes that are fused with it."""
        give_own_bodies(nodes_in(args, list(kwargs.values())))
        return super().codegen_template(*args, **kwargs)

    def flush(self) -> None:
        """Call the kernels collected so far as one function."""
        nodes, args = self.kernel_group.scheduled_nodes, self.kernel_group.args
        if nodes:
            call_kernel(self.kernels, nodes, args)
        self.reset_kernel_group()  # type: ignore[no-untyped-call]
        self._set_flush_status(False)

    def define_kernel(self, src_code: str, nodes: list[Any], kernel_args: Any = None) -> str:
        """Define a kernel's name in the wrapper, without code, and return the name."""
        return name_kernel(self.kernels, nodes)

    def codegen_comment(self, *args: Any, **kwargs: Any) -> None:
        """Write no comment: comments name the origins of all nodes."""


class LightLoops(CppKernelProxy):
    """Loops of one kernel inside of outer loops that the kernel shares with other kernels.

    Inductor decides which buffers are local to the shared loops, and fuses the outer loops only if all kernels cut them into the
    same tiles.

    Args:
        depth: Number of shared loops.
    """

    def __init__(self, depth: int, kernel_group: Any) -> None:
        super().__init__(kernel_group)  # type: ignore[no-untyped-call]
        self.depth = depth

    def codegen_nodes(self, nodes: list[Any]) -> None:
        """Decide about the buffers of the kernel, and record its loops."""
        sizes = [node.group[1] for node in nodes]
        loops, reduced = max(sizes, key=lambda each: len(each[1]))
        LightKernel(self.kernel_group.args).take_in(nodes)
        self.set_ranges(loops, reduced)  # type: ignore[no-untyped-call]
        self.loop_nest = cpp.LoopNest.build(self)
        self.loop_nest.set_kernel(self)
        if self.picked_vec_isa and self.itervars and self._may_tile(nodes, sizes):
            for k, factor in self._tiles(nodes, sizes):
                self.loop_nest.tile(k, factor)

    def _may_tile(self, nodes: list[Any], sizes: list[Any]) -> bool:
        """True if a shared loop may be cut into tiles; mostly Inductor cuts the innermost loop."""
        divided = any(
            expr.has(FloorDiv, ModularIndexing) for node in nodes for expr in node._body.indexing_exprs.values()
        )
        lanes = {self.picked_vec_isa.nelements(dtype=dtype) for dtype in (torch.float32, torch.bfloat16)[: 1 + divided]}
        select = cpp.TilingSelect()._select_tiling_indices
        return any(
            k % len(self.itervars) < self.depth for each in lanes for k in select(self._functions(nodes), sizes, each)
        )

    def _tiles(self, nodes: list[Any], sizes: list[Any]) -> list[tuple[int, int]]:
        """The loops that are cut into tiles, and the tile lengths, as Inductor selects them for the bodies that it emits."""
        give_own_bodies(nodes)
        self.legalize_lowp_fp_dtype(nodes)  # type: ignore[no-untyped-call]
        self.data_type_propagation(nodes)  # type: ignore[no-untyped-call]
        factors, found, *_ = cpp.TilingSelect().select_tiling(self._functions(nodes), sizes)
        return list(zip(found, factors, strict=True))

    def _functions(self, nodes: list[Any]) -> list[Any]:
        """The loop bodies, or functions that run them and index buffers local to the shared loops by the inner loops."""
        if not getattr(V.local_buffer_context, "local_buffers", None):
            return [node._body for node in nodes]
        functions = [partial(_run_body, node) for node in nodes]
        wrapped: list[Any] = [V.local_buffer_context.localize_function(function) for function in functions]
        for outer, inner in zip(wrapped, functions, strict=True):
            outer.original_fn = inner
        return wrapped

    def codegen_loops(self, code: Any, worksharing: Any) -> None:
        """Write no text."""


def _run_body(node: Any, *index: Any) -> Any:
    return node._body(*index)
