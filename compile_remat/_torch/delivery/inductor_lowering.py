"""Inductor's side of `DELIVER`: a kernel that takes over the buffer of its gradient.

Inductor would reuse the buffer for a later kernel's output, or keep the buffer until the function returns if told not to.  Here the
buffer is marked as never reused, and the kernel's own code deletes the variable.  The lowering is registered in Inductor's table of
lowerings, as any library's may be; no code of Inductor is replaced.  If a pass of Inductor has put a reader of the gradient or the
parameter behind the delivery, the gradient is copied, or returned at the end of the backward.

Private names, same in 2.11 to 2.15: ``ir.FallbackKernel.create`` and ``.codegen``, ``GraphLowering.never_reuse_buffers``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from compile_remat._torch.delivery.delivery_ops import DELIVER, MOVED
from compile_remat._torch.version import private_module, private_name

ir = private_module("torch._inductor.ir")
V = private_name("torch._inductor.virtualized", "V")
register_lowering = private_name("torch._inductor.lowering", "register_lowering")
FallbackKernel: Any = getattr(ir, "FallbackKernel", object)


class DeliveryKernel(FallbackKernel):  # type: ignore[misc]
    """The call of `DELIVER`, after which the variable of the gradient is deleted.

    Attributes:
        taken: Name of the buffer that the call takes over; empty if the call copies the gradient.
    """

    taken = ""

    def codegen(self, wrapper: Any) -> None:
        """Emit the call, and the ``del`` of the buffer that it takes over."""
        super().codegen(wrapper)
        if self.taken:
            wrapper.writeline(f"del {self.taken}")


def _lower(gradient: Any, parameter: Any, index: int, edge: int, edges: int, copied: bool) -> None:
    graph, node = V.graph, V.graph.current_node
    gradient.realize()
    name = gradient.get_name()
    is_ours = name not in graph.graph_inputs and name not in graph.constants and name not in graph.never_reuse_buffers
    is_taken = is_ours and not copied and _is_last_reader(node, [node.args[0]])
    if not _is_last_reader(node, node.args[1]):
        edge = MOVED
    for tensor in (gradient, *parameter):  # lazy values that read them are computed before the delivery, not behind it
        graph.mark_buffer_mutated(tensor.get_name())
    before = len(graph.operations)
    DeliveryKernel.create(DELIVER, gradient, parameter, index, edge, edges, not is_taken)
    if is_taken:
        graph.never_reuse_buffers.add(name)
        for operation in graph.operations[before:]:
            if isinstance(operation, DeliveryKernel):
                operation.taken = name


def _is_last_reader(delivery: fx.Node, given: Iterable[fx.Node]) -> bool:
    """Returns whether no node behind `delivery` reads `given` or views of them, in the graph as Inductor's passes left it."""
    seen, pending = set[fx.Node](), list(given)
    while pending:
        for user in pending.pop().users:
            if user in seen or user is delivery or user.target is DELIVER or user.op == "output":
                continue
            seen.add(user)
            if getattr(user.target, "is_view", False) or user.target is operator.getitem:
                pending.append(user)
            if delivery < user:
                return False
    return True


def drop_waiting_from_users(nodes: Iterable[Any]) -> None:
    """Remove deliveries from the users of buffers that they only wait for, so that these buffers can be reused in place.

    The schema of a delivery says that it writes into its parameter.  So Inductor orders the delivery behind each kernel that reads
    the parameter, and lists it among the users of that kernel's output (weak users, ``Scheduler.compute_dependencies``).  While a
    buffer has a user left, ``decide_inplace_update`` reuses it for no output.  The delivery still waits by its own dependencies.
    """
    for node in nodes:
        for buffer in node.get_outputs():
            read = [user for user in buffer.users if not (user.is_weak and _is_delivery(user))]
            buffer.users = read or buffer.users


def _is_delivery(user: Any) -> bool:
    return isinstance(getattr(user.node, "node", None), DeliveryKernel)


def register() -> None:
    """Register the lowering of `DELIVER` with Inductor; one call is enough."""
    register_lowering(DELIVER, type_promotion_kind=None)(_lower)
