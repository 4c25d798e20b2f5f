"""Loads and operations of fused expressions: ours beside those that Inductor counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch.operators import is_spare_cast
from compile_remat.passes.graph import build
from compile_remat.passes.graph.lowering.materialisation import count_reads
from compile_remat.passes.graph.node_drafts import DraftGraph, Expression
from tests.passes.graph.test_build import problem_of

aten, prims = torch.ops.aten, torch.ops.prims


def by_inductor(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[int, int]:
    """Operations of the only kernel of a function, loads among them, and these."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = make_fx(function)(*arguments)
    lowered = GraphLowering(module)
    with V.set_graph_handler(lowered), V.set_fake_mode(mode):
        lowered.run(*[n.meta["val"] for n in module.graph.find_nodes(op="placeholder")])  # type: ignore[no-untyped-call]
    (result,) = lowered.operations
    assert isinstance(result, ir.ComputedBuffer) and isinstance(result.data, ir.Pointwise)
    counted = result.data.inner_fn_opcount()
    return counted.num_ops, len(counted.read_buffers)


def by_rules(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[int, int]:
    """The same by our rules, of the function's forward."""
    found: list[Expression] = []

    def spy(graph: DraftGraph) -> None:
        count_reads(graph)
        (output,) = graph.joint.module.graph.find_nodes(op="output")
        (last,) = [draft for draft in graph.values if draft.node in output.args[0]]
        found.append(last.sources[0].expression)

    with mock.patch.object(build, "PASSES", (spy, *build.PASSES[1:])):
        problem_of(lambda *given: function(*given).cumsum(0), *arguments)
    (expression,) = found
    return len(expression.ops) + len(expression.reads), len(expression.reads)


def pooled(x: Tensor, gradient: Tensor, places: Tensor) -> Tensor:
    """Equal constants are one operation, and a size is none; Inductor compares them by their text: 0 and 0.0 are two."""
    like_x = aten.full([1, 2, 8, 8], 0.0, dtype=torch.float32)
    zero = aten.full([], 0.0, dtype=torch.float32)
    spread = aten.max_pool2d_with_indices_backward(gradient, like_x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)
    other = aten.full([], 0.0, dtype=torch.float32)
    return torch.where(x <= 0, zero, torch.where(x > 3, other, spread))


def summed(x: Tensor, w: Tensor) -> Tensor:
    """A sum of four elements loads each of them, so that two readers have it in memory: more than four loads are too many."""
    return (x * w).sum(-1)


def enlarged(x: Tensor, rows: Tensor) -> Tensor:
    """One list of places is looked up for rows and for columns."""
    places = prims.convert_element_type(rows * 0.5, torch.int64)
    result: Tensor = aten._unsafe_index(x.sin(), [None, None, places.unsqueeze(-1), places])
    return result


IMAGES, POOLED = torch.ones(1, 2, 8, 8), torch.ones(1, 2, 4, 4)
EXPRESSIONS: dict[Callable[..., Any], tuple[Tensor, ...]] = {
    pooled: (IMAGES, POOLED, torch.zeros(1, 2, 4, 4, dtype=torch.int64)),
    summed: (torch.ones(8, 16, 4), torch.ones(16, 4)),
    enlarged: (IMAGES, torch.arange(16.0)),
}


@pytest.mark.parametrize("function", EXPRESSIONS, ids=lambda function: function.__name__)
def test_an_expression_has_the_loads_and_operations_that_inductor_counts(function: Callable[..., Tensor]) -> None:
    arguments = EXPRESSIONS[function]
    ours = by_rules(function, *(a.clone().requires_grad_(a.is_floating_point() and a.dim() > 1) for a in arguments))
    assert ours == by_inductor(function, *arguments)


def test_a_cast_to_the_type_that_a_pattern_left_is_spare() -> None:
    """Inductor writes a loss's gradient in float32 where the graph says bfloat16: what casts the product does nothing."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.empty(4, dtype=torch.float32), torch.empty(4, dtype=torch.bfloat16)
    product = graph.call_function(aten.mul.Tensor, (x, y))
    product.meta["val"] = torch.empty(4, dtype=torch.bfloat16)
    casts = [
        graph.call_function(prims.convert_element_type.default, (product, d)) for d in (torch.float32, torch.bfloat16)
    ]
    assert [is_spare_cast(node) for node in casts] == [True, False]
    product.meta["val"] = torch.empty(4, dtype=torch.float32)
    assert [is_spare_cast(node) for node in casts] == [True, False]
    assert not is_spare_cast(product)
