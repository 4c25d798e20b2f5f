"""Fused kernels without code text, which decide the buffers that are allocated, reused in place, or never written.

Inductor's own functions make these decisions: ``decide_inplace_update`` and ``mark_run`` of a node, and
``Kernel.remove_kernel_local_buffers``.

Private names of ``torch._inductor``, same in 2.11 to 2.15: ``codegen.common.Kernel`` and its attributes,
``loop_body.MemoryUsageType`` and ``LoopBody.memory_usage``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_name

if TYPE_CHECKING:
    from torch._inductor.codegen.common import Kernel
else:
    Kernel = private_name("torch._inductor.codegen.common", "Kernel")
V = private_name("torch._inductor.virtualized", "V")
MemoryUsageType = private_name("torch._inductor.loop_body", "MemoryUsageType")
LOADS = (MemoryUsageType.LOAD, MemoryUsageType.LOAD_SEED, MemoryUsageType.BUCKETIZE)
STORES = (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)

Kernels = dict[str, list[Any]]
"""The scheduler nodes that each kernel runs, by the kernel's name in the wrapper."""


class LightKernel(Kernel):
    """A fused kernel that has arguments and no code.

    Args:
        args: Arguments of the C++ function that the kernel becomes part of; by default the kernel has arguments of its own.
    """

    overrides = object  # type: ignore[assignment]

    def __init__(self, args: Any = None) -> None:
        super().__init__(args, increase_kernel_count=False)

    def take_in(self, nodes: Iterable[Any]) -> None:
        """Decide in-place reuse and allocate outputs node by node; then drop the buffers that no other kernel reads."""
        with V.set_kernel_handler(self):
            for node in nodes:
                node.decide_inplace_update()
                node.mark_run()
                self._note_accesses(node)
            self.remove_kernel_local_buffers()
        self.tell_graph()

    def take_in_at_once(self, nodes: list[Any], kept: Iterable[str] = ()) -> None:
        """Decide in-place reuse of all nodes before any output is allocated; the graph is not told yet.

        Args:
            kept: Buffers that are not dropped, as the kernel reads them back from memory.
        """
        self.must_keep_buffers.update(kept)
        with V.set_kernel_handler(self):
            for node in nodes:
                node.decide_inplace_update()
            for node in nodes:
                self._note_accesses(node)
            self.remove_kernel_local_buffers()
            for node in nodes:
                node.mark_run()

    def tell_graph(self) -> None:
        """Tell the graph which buffers are never allocated."""
        V.graph.removed_buffers |= self.removed_buffers
        V.graph.inplaced_to_remove |= self.inplaced_to_remove

    def _note_accesses(self, node: Any) -> None:
        """Add a node's buffers to the kernel's arguments, as ``CSEProxy.load`` and ``.store`` do.

        A buffer that the kernel has stored is not loaded, and a buffer that is local to the C++ function is no argument.
        """
        local = getattr(V.local_buffer_context, "global_to_local", ())
        for name in accessed(node, LOADS):
            if name not in self.store_buffer_names and name not in local:
                self.args.input(name)
        for name in accessed(node, STORES):
            if name in local:
                continue
            self.store_buffer_names.add(name)
            if name not in V.graph.removed_buffers:
                self.args.output(name)


def accessed(node: Any, usages: Iterable[Any]) -> list[str]:
    """The buffers that a node's loop body loads or stores; the node's dependencies also name buffers that only order the node."""
    entries = node._body.memory_usage
    return [entry.buffer_name for usage in usages for entry in entries[usage]]


def call_kernel(kernels: Kernels, nodes: Iterable[Any], args: Any, method: str = "") -> None:
    """Write the call of a new kernel into the wrapper, with the buffers that are left among its arguments."""
    _, names, *_ = args.python_argdefs()
    V.graph.wrapper_code.writeline(f"{name_kernel(kernels, nodes)}{method}({', '.join(map(str, names))})")


def name_kernel(kernels: Kernels, nodes: Iterable[Any]) -> str:
    """Define a new kernel name for some nodes in the wrapper, without code, and return the name."""
    name = f"kernel_{len(kernels)}"
    kernels[name] = list(nodes)
    V.graph.wrapper_code.define_kernel(name, "async_compile.light()", gpu=False)
    return name
