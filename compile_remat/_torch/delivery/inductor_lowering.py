"""Inductor's side of `DELIVER`: a kernel that takes its gradient's buffer over.

Inductor would write a later kernel's output over the buffer, or keep it until the function returns if it is told not to.  Here the
buffer is marked as never reused, and the kernel's own code drops the variable.  It is registered in Inductor's table of lowerings,
as any operator of a library may be; nothing of Inductor is replaced.

Private names, same in 2.11 to 2.15: ``ir.FallbackKernel.create`` and ``.codegen``, ``GraphLowering.never_reuse_buffers``.
"""

from __future__ import annotations

from typing import Any

from compile_remat._torch.delivery.delivery_ops import DELIVER
from compile_remat._torch.version import private_module, private_name

ir = private_module("torch._inductor.ir")
V = private_name("torch._inductor.virtualized", "V")
register_lowering = private_name("torch._inductor.lowering", "register_lowering")
FallbackKernel: Any = getattr(ir, "FallbackKernel", object)


class DeliveryKernel(FallbackKernel):  # type: ignore[misc]
    """The call of `DELIVER`, and the end of the variable that held the gradient.

    Attributes:
        taken: The buffer that it takes over; empty where it copies it.
    """

    taken = ""

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        super().codegen(wrapper)
        if self.taken:
            wrapper.writeline(f"del {self.taken}")


def _lower(gradient: Any, parameter: Any, index: int, edge: int, edges: int, copied: bool) -> None:
    gradient.realize()
    name = gradient.get_name()
    is_ours = name not in V.graph.graph_inputs and name not in V.graph.constants
    is_taken = not copied and is_ours and name not in V.graph.never_reuse_buffers
    before = len(V.graph.operations)
    DeliveryKernel.create(DELIVER, gradient, parameter, index, edge, edges, not is_taken)
    if is_taken:
        V.graph.never_reuse_buffers.add(name)
        for operation in V.graph.operations[before:]:
            if isinstance(operation, DeliveryKernel):
                operation.taken = name


def register() -> None:
    """Teach Inductor the operator; once is enough."""
    register_lowering(DELIVER, type_promotion_kind=None)(_lower)
