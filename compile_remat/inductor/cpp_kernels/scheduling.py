"""Makes Inductor call its C++ kernels one by one under a plan.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_name
from compile_remat.inductor.cpp_kernels.building import build_together

if TYPE_CHECKING:
    from torch._inductor.codegen.cpp import CppScheduling
else:
    CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
ComputedBuffer = private_name("torch._inductor.ir", "ComputedBuffer")
SchedulerNode = private_name("torch._inductor.scheduler", "SchedulerNode")
V = private_name("torch._inductor.virtualized", "V")


class SeparateKernels(CppScheduling):
    """Inductor's C++ backend, which ends a function at each kernel after which a buffer can be freed.

    By default, the backend makes one function of all kernels up to the next unfused one: the wrapper allocates all of their outputs
    before the function, and frees all of their inputs after it.
    """

    def ready_to_flush(self) -> bool:
        """Returns whether the kernels collected so far are called now."""
        is_ready: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_ready or bool(V.graph.scheduler.buffer_names_to_free)

    def _can_fuse_nodes_with_compatible_ranges(self, node1: Any, node2: Any) -> bool:
        """Returns whether the loops of two pointwise kernels can be made equal; Inductor only tries if one has a single loop.

        The gradient of a pooling loops over rows and columns, and the tensor that it is multiplied by over all pixels: in two
        loops, a sigmoid that both read was written to memory between them.
        """
        if super()._can_fuse_nodes_with_compatible_ranges(node1, node2):  # type: ignore[no-untyped-call]
            return True
        if not hasattr(self, "_align_compatible_range_nodes"):  # 2.11 and 2.12 have none
            return False
        (loops1, reduced1), (loops2, reduced2) = node1.group[1], node2.group[1]
        fewest = node1 if len(loops1) < len(loops2) else node2
        sizes = {_sizes(part) for node in (node1, node2) for part in node.get_nodes()}
        if reduced1 or reduced2 or len(loops1) == len(loops2) or len(sizes) > 1 or None in sizes:
            return False
        if type(fewest) is not SchedulerNode:  # Inductor changes the loops of no joined kernel that has fewer
            return False
        states = [(part, part.snapshot_loop_state()) for node in (node1, node2) for part in node.get_nodes()]
        try:
            is_one_loop: bool = self._align_compatible_range_nodes(node1, node2)  # type: ignore[no-untyped-call]
            return is_one_loop
        finally:
            for part, state in reversed(states):
                part.restore_loop_state(state)


def _sizes(node: Any) -> tuple[Any, ...] | None:
    """The sizes that the loops of a kernel's node run over; None for a kernel that is not Inductor's own."""
    return tuple(node.node.data.get_size()) if isinstance(node.node, ComputedBuffer) else None


def replace_backends(scheduler: Any) -> None:
    """Give a graph's scheduler `SeparateKernels` for the devices that Inductor makes C++ for; call before any code is made.

    C++ kernels are called one by one and built together.  A wrapper that itself is C++ builds its own kernels.
    """
    for device in {node.get_device() for node in scheduler.nodes} - {None}:
        if type(scheduler.get_backend(device)) is CppScheduling:
            scheduler.backends[device] = SeparateKernels(scheduler)  # type: ignore[no-untyped-call]
            if not V.graph.cpp_wrapper:
                build_together(V.graph.wrapper_code)
