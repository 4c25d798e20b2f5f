"""Operators that draw from a generator run in the graph's order: whichever runs first gets the first numbers.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15 but for the class of passes.  Inductor
orders kernels by the tensors that they read.  Two draws read nothing of each other: a kernel that is joined with another moves to
its place, and the draw that it reads goes with it.  Where that happens depends on what is saved.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from compile_remat._torch.version import private_name
from compile_remat.inductor.plan_guard import PassBehind, number_anew

WeakDep = private_name("torch._inductor.dependencies", "WeakDep")


class DrawsInTurn(PassBehind):
    """Each draw waits for the one before it."""

    name = "compile_remat: draws in turn"

    def reorder(self, nodes: list[Any]) -> list[Any]:
        """The nodes as they are; what sorts them later keeps the order of their draws."""
        draws = list(filter(_draws, nodes))
        for earlier, later in pairwise(draws):
            first, second = (node.get_outputs()[0].get_name() for node in (earlier, later))
            later.add_fake_dep(WeakDep(first, mutating_buf=second, is_fake=True))
        if len(draws) > 1:
            number_anew(nodes)  # a fusion that would put a draw before an earlier one is then a cycle
        return nodes


def _draws(node: Any) -> bool:
    """Whether a node of the scheduler calls an operator that draws; the seeds of Inductor's own kernels are one as well."""
    overload = getattr(node.node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags
