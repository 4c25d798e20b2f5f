"""Inductor's side of `DELIVER`: a kernel that takes its gradient's buffer over.

Inductor would write a later kernel's output over the buffer, or keep it until the function returns if it is told not to.  Here the
buffer is marked as never reused, and the kernel's own code drops the variable.  It is registered in Inductor's table of lowerings,
as any operator of a library may be; nothing of Inductor is replaced.  Where a pass of Inductor's has put a reader behind it all the
same, the gradient is copied, or goes to the end of the backward.

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
    graph, node = V.graph, V.graph.current_node
    gradient.realize()
    name = gradient.get_name()
    is_ours = name not in graph.graph_inputs and name not in graph.constants and name not in graph.never_reuse_buffers
    is_taken = is_ours and not copied and _is_last_reader(node, [node.args[0]])
    if not _is_last_reader(node, node.args[1]):
        edge = MOVED
    for tensor in (gradient, *parameter):  # what has been read of them so far is computed before, not behind
        graph.mark_buffer_mutated(tensor.get_name())
    before = len(graph.operations)
    DeliveryKernel.create(DELIVER, gradient, parameter, index, edge, edges, not is_taken)
    if is_taken:
        graph.never_reuse_buffers.add(name)
        for operation in graph.operations[before:]:
            if isinstance(operation, DeliveryKernel):
                operation.taken = name


def _is_last_reader(delivery: fx.Node, given: Iterable[fx.Node]) -> bool:
    """Whether nothing behind a delivery reads what it is given, in the graph as Inductor's passes left it."""
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
    """Take a scheduler's deliveries off the users of what they only wait for.

    A delivery counts as writing into its parameter.  So Inductor has it wait for each kernel that reads the parameter, and lists it
    among the users of that kernel's result (weak ones, ``Scheduler.compute_dependencies``).  With a user left,
    ``decide_inplace_update`` lets nobody write over the result.  The delivery goes on waiting by its own dependencies.
    """
    for node in nodes:
        for buffer in node.get_outputs():
            read = [user for user in buffer.users if not (user.is_weak and _is_delivery(user))]
            buffer.users = read or buffer.users


def _is_delivery(user: Any) -> bool:
    return isinstance(getattr(user.node, "node", None), DeliveryKernel)


def register() -> None:
    """Teach Inductor the operator; once is enough."""
    register_lowering(DELIVER, type_promotion_kind=None)(_lower)
