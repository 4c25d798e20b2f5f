"""Nodes and the views of them, on one small graph."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from compile_remat.passes.graph import views
from tests.passes.joint import joint_of


def function(x: Tensor) -> Tensor:
    y = x.sin()
    flat = y.view(16)
    return (flat.exp() * flat).sum() + y.t().cos().sum()


def test_golden_of_readers_and_shapes() -> None:
    """`sin` has two readers of its own, views, of which `view` has three: Inductor counts those of one tensor."""
    graph = joint_of(function, torch.randn(4, 4, requires_grad=True)).module.graph
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
