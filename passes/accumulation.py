"""Gradients that are summed up: where Inductor makes one kernel of a matmul and the addition of its product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from compile_remat.passes.views import shape

aten = torch.ops.aten

MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})


def becoming_addmm(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Additions, among `nodes` in the order they run in, that become ``addmm(c, a, b)``: they are written to memory.

    So do Inductor's passes after partitioning (``post_grad.py``) with ``add(mm(a, b), c)`` where nothing else reads the product.
    Where other matmuls lie between product and addition, `keep_matmuls_in_place` keeps both as they are.
    """
    found = set()
    heavy: fx.Node | None = None
    for node in nodes:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            lone = [a for a in node.args if _is_lone_mm(a)]
            if heavy is not None and lone == [heavy] and shape(node) == shape(heavy):
                found.add(node)
        elif node.target in MATMULS or node.target in CONVOLUTIONS:
            heavy = node
    return frozenset(found)


def _is_lone_mm(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mm.default and len(node.users) == 1
