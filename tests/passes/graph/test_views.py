"""Nodes and the views of them, on one graph that is printed here."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from compile_remat.passes.graph import views
from tests.passes.joint import joint_of, text


def function(x: Tensor) -> Tensor:
    y = x.sin()
    flat = y.view(16)
    return (flat.exp() * flat).sum() + y.t().cos().sum()


def test_golden_of_readers_and_shapes() -> None:
    """`sin` has two readers of its own, views, of which `view` has three: Inductor counts those of one tensor."""
    graph = joint_of(function, torch.randn(4, 4, requires_grad=True)).module.graph
    assert_expected_inline(
        text(graph),
        """\
sin: f32[4, 4] = aten.sin(primals_1)
view: f32[16] = aten.view(sin, [16])
exp: f32[16] = aten.exp(view)
alias: f32[16] = aten.alias(exp)
mul: f32[16] = aten.mul(exp, view)
sum_1: f32[] = aten.sum(mul, [])
permute: f32[4, 4] = aten.permute(sin, [1, 0])
cos: f32[4, 4] = aten.cos(permute)
sum_2: f32[] = aten.sum(cos, [])
add: f32[] = aten.add(sum_1, sum_2)
expand: f32[4, 4] = aten.expand(tangents_1, [4, 4])
sin_1: f32[4, 4] = aten.sin(permute)
neg: f32[4, 4] = aten.neg(sin_1)
mul_1: f32[4, 4] = aten.mul(expand, neg)
permute_1: f32[4, 4] = aten.permute(mul_1, [1, 0])
expand_1: f32[16] = aten.expand(tangents_1, [16])
mul_2: f32[16] = aten.mul(expand_1, exp)
mul_3: f32[16] = aten.mul(expand_1, view)
alias_1: f32[16] = aten.alias(alias)
mul_4: f32[16] = aten.mul(mul_3, alias_1)
add_1: f32[16] = aten.add(mul_2, mul_4)
view_1: f32[4, 4] = aten.view(add_1, [4, 4])
add_2: f32[4, 4] = aten.add(permute_1, view_1)
cos_1: f32[4, 4] = aten.cos(primals_1)
mul_5: f32[4, 4] = aten.mul(add_2, cos_1)
return add, mul_5""",
    )
    nodes = {node.name: node for node in graph.nodes}
    facts = [
        f"{name}: {views.shape(nodes[name])}, {views.most_users(nodes[name])} readers, "
        f"{'read in another shape' if views.is_reshaped(nodes[name]) else 'read in its own shape'}"
        for name in ("sin", "view", "permute", "exp")
    ]
    assert_expected_inline(
        "\n".join(facts),
        """\
sin: (4, 4), 3 readers, read in another shape
view: (16,), 3 readers, read in its own shape
permute: (4, 4), 2 readers, read in its own shape
exp: (16,), 3 readers, read in its own shape""",
    )
