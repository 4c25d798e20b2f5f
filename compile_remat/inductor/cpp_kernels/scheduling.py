"""How Inductor calls its C++ kernels: one by one.  Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_remat._torch.version import private_name
from compile_remat.inductor.cpp_kernels.building import build_together

if TYPE_CHECKING:
    from torch._inductor.codegen.cpp import CppScheduling
else:
    CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
V = private_name("torch._inductor.virtualized", "V")


class SeparateKernels(CppScheduling):
    """Inductor's C++ backend, calling each kernel on its own where something can be freed after it.

    By itself it makes one function of all kernels up to the next unfused one: all of their outputs are allocated before it,
    and all that they read is freed after it.
    """

    def ready_to_flush(self) -> bool:
        """Whether the kernels so far are called now."""
        is_ready: bool = super().ready_to_flush()  # type: ignore[no-untyped-call]
        return is_ready or bool(V.graph.scheduler.buffer_names_to_free)


def call_kernels_apart(scheduler: Any) -> None:
    """Give a graph's scheduler `SeparateKernels` for the devices that Inductor makes C++ for; before any code is made.

    What is called apart is built together, unless the wrapper itself is C++.
    """
    for device in {node.get_device() for node in scheduler.nodes} - {None}:
        if type(scheduler.get_backend(device)) is CppScheduling:
            scheduler.backends[device] = SeparateKernels(scheduler)  # type: ignore[no-untyped-call]
            if not V.graph.cpp_wrapper:
                build_together(V.graph.wrapper_code)
