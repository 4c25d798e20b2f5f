"""Sums of gradients in which Inductor turns a matmul and the addition of its product into one ``addmm`` kernel.

`keep_matmuls_in_place` prevents such kernels across other matmuls; `becoming_addmm` tells the planner which additions become one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from compile_remat._torch.delivery.delivery_ops import GRADIENT_READY
from compile_remat._torch.operators import call
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.views import fake_mode_of, shape

aten = torch.ops.aten

HEAVY = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default, aten.convolution_backward.default,
    }
)  # fmt: skip
"""Operators that take long and hold much memory: no matmul may be moved across them to a later addition."""


def becoming_addmm(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Additions, among `nodes` in execution order, that become ``addmm(c, a, b)`` and so are written to memory.

    Inductor's passes after partitioning (``post_grad.py``) replace ``add(c, mm(a, b))`` if no other node reads the product.  If
    other matmuls lie between product and addition, `keep_matmuls_in_place` keeps both as they are.  On a GPU, Inductor keeps an
    addition that only pointwise kernels read (``should_prefer_unfused_addmm``).
    """
    found: dict[fx.Node, None] = {}
    heavy: fx.Node | None = None
    for node in nodes:
        if node.target is aten.add.Tensor and not node.kwargs and len(node.all_input_nodes) == 2:
            lone = [a for a in node.args if _is_lone_mm(a)]
            if heavy is not None and heavy in lone and shape(node) == shape(heavy):
                found[node] = None
        elif node.target in HEAVY:
            heavy = node
        elif node.target is GRADIENT_READY:  # Inductor forms no `addmm` across a gradient that leaves
            heavy = None
    for node in reversed(list(found)):
        if node.meta["val"].device.type != "cpu" and all(u not in found and _is_pointwise(u) for u in node.users):
            del found[node]
    return frozenset(found)


def _is_pointwise(node: fx.Node) -> bool:
    """Returns whether a node is pointwise; for a view, whether all its readers are."""
    if getattr(node.target, "is_view", False):
        return all(map(_is_pointwise, node.users))
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def keep_matmuls_in_place(module: fx.GraphModule) -> Rewritten:
    """Keep Inductor from moving a matmul down to a later addition; returns the number of additions that were rewritten for it.

    Inductor's pass after partitioning turns ``add(mm(a, b), c)`` into ``addmm(c, a, b)`` at the place of the addition.  If other
    matmuls lie in between, as for the gradients of tied weights, `a` and `b` then stay alive until there instead of their product.
    So the addition is done on three-dimensional views, which give the same kernel and do not match the pattern.  If the other
    summand is a product, too, and no matmul lies between that product and the addition, it becomes the last operand: Inductor
    matches the last operand first, so the earlier matmul stays in its place.  These swaps are not counted.
    """
    order = {node: k for k, node in enumerate(module.graph.nodes)}
    matmuls = [k for node, k in order.items() if node.target in HEAVY]
    kept = swapped = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        far = [a for a in node.args if _is_lone_mm(a) and any(order[a] < k < order[node] for k in matmuls)]
        shapes = {_shape_text(a) for a in node.args}
        if not far or len(node.args) != 2 or len(shapes) > 1:
            continue
        near = [a for a in node.args if _is_lone_mm(a) and a not in far]
        if near and not node.kwargs:
            swapped += node.args[1] is not near[0]
            node.args = (far[0], near[0])
            continue
        with fake_mode_of(node.meta["val"]), module.graph.inserting_before(node):
            raised = [call(module.graph, aten.unsqueeze.default, (a, 0)) for a in node.args]
            total = call(module.graph, aten.add.Tensor, tuple(raised), node.kwargs)
            flat = call(module.graph, aten.squeeze.dim, (total, 0))
        flat.meta = {**node.meta, "val": flat.meta["val"]}
        node.replace_all_uses_with(flat)
        module.graph.erase_node(node)
        kept += 1
    if kept or swapped:
        module.recompile()
    return Rewritten(kept)


def _is_lone_mm(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mm.default and len(node.users) == 1


def _shape_text(node: object) -> str:
    """The sizes as text: symbolic sizes have no hash, and comparing them may add a guard."""
    return str(node.meta["val"].shape) if isinstance(node, fx.Node) and _is_tensor(node) else ""


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
