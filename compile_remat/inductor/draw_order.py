"""Keeps operators that draw random numbers in the graph's order: the first to run gets the generator's first numbers.

Private names of ``torch._inductor``, same in 2.11, 2.13 and 2.15 but for the class of passes.  Inductor
orders kernels by the tensors that they read.  Two draws read nothing of each other: a kernel that is fused with another moves to
the other's place, and the draw that it reads moves with it.  The saved tensors decide where such moves happen.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from compile_remat._torch.version import private_name
from compile_remat.inductor.plan_guard import PassBehind, number_anew

WeakDep = private_name("torch._inductor.dependencies", "WeakDep")


class DrawsInTurn(PassBehind):
    """Makes each draw depend on the draw before it."""

    name = "compile_remat: draws in turn"

    def reorder(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes as they are; the added dependencies keep the draws in order when Inductor sorts the nodes later."""
        draws = list(filter(_draws, nodes))
        for earlier, later in pairwise(draws):
            first, second = (node.get_outputs()[0].get_name() for node in (earlier, later))
            later.add_fake_dep(WeakDep(first, mutating_buf=second, is_fake=True))
        if len(draws) > 1:
            number_anew(nodes)  # a fusion that would put a draw before an earlier one is then a cycle
        return nodes


def _draws(node: Any) -> bool:
    """True if a scheduler node calls an operator that draws; the seeds of Inductor's own kernels are such a draw."""
    overload = getattr(node.node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in overload.tags
