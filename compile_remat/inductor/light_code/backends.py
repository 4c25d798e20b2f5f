"""Inductor's code generators without kernels: they decide which buffers a kernel allocates, takes over or never writes.

All of that is decided by Inductor's own functions: ``decide_inplace_update`` and ``mark_run`` of a node,
``Kernel.remove_kernel_local_buffers``, ``Scheduler.free_buffers`` and the wrapper.  The text of the kernels is left out.

Private names of ``torch._inductor``, same in 2.11 to 2.15: ``codegen.common.Kernel``, ``codegen.cpp.CppScheduling`` and
``.OuterLoopFusedSchedulerNode``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_name

if TYPE_CHECKING:
    from torch._inductor.codegen.common import Kernel
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.triton import TritonScheduling
else:
    Kernel = private_name("torch._inductor.codegen.common", "Kernel")
    CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
    TritonScheduling = private_name("torch._inductor.codegen.triton", "TritonScheduling")
OuterLoopFusedSchedulerNode = private_name("torch._inductor.codegen.cpp", "OuterLoopFusedSchedulerNode")
V = private_name("torch._inductor.virtualized", "V")

Kernels = dict[str, list[Any]]
"""Names of kernels, as the wrapper calls them, and the scheduler's nodes that each runs."""


class LightKernel(Kernel):
    """A fused kernel of which only the arguments are known."""

    overrides = object  # type: ignore[assignment]

    def __init__(self, args: Any = None) -> None:
        super().__init__(args, increase_kernel_count=False)  # type: ignore[no-untyped-call]

    def take_in(self, nodes: list[Any]) -> None:
        """Decide what the nodes write over, allocate what they write, and drop what no other kernel reads."""
        with V.set_kernel_handler(self):
            for node in nodes:
                node.decide_inplace_update()
                node.mark_run()
                self._note_accesses(node.read_writes)
            self.remove_kernel_local_buffers()
        V.graph.removed_buffers |= self.removed_buffers
        V.graph.inplaced_to_remove |= self.inplaced_to_remove

    def _note_accesses(self, accesses: Any) -> None:
        """Arguments of the kernel, as ``CSEProxy.load`` and ``.store`` make them: a buffer that it wrote is not loaded."""
        for dep in accesses.reads:
            if dep.name not in self.store_buffer_names:
                self.args.input(dep.name)
        for dep in accesses.writes:
            self.store_buffer_names.add(dep.name)
            if dep.name not in V.graph.removed_buffers:
                self.args.output(dep.name)


class LightCpp(CppScheduling):
    """Inductor's C++ backend without kernels, each called on its own where something can be freed after it.

    Loops with common outer loops go through Inductor's own code: it decides there which buffers are local to them.
    """

    def __init__(self, scheduler: Any, kernels: Kernels) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self.kernels = kernels

    def ready_to_flush(self) -> bool:
        """Whether the kernels so far are called now; as for `SeparateKernels`."""
        is_ready: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_ready or bool(V.graph.scheduler.buffer_names_to_free)

    def codegen_node(self, node: Any) -> None:
        """Decide about the buffers of one fused kernel."""
        if isinstance(node, OuterLoopFusedSchedulerNode):
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


def name_kernel(kernels: Kernels, nodes: list[Any]) -> str:
    """A new name for the kernel of some nodes, defined in the wrapper."""
    name = f"kernel_{len(kernels)}"
    kernels[name] = list(nodes)
    V.graph.wrapper_code.define_kernel(name, "async_compile.light()", gpu=False)
    return name
