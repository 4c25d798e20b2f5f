"""Loads and operations of fused expressions: ours beside those that Inductor counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
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
from compile_remat.passes.graph.lowering.expressions import ops_in
from compile_remat.passes.graph.lowering.materialisation import count_reads
from compile_remat.passes.graph.node_drafts import DraftGraph
from tests.passes.graph.test_build import problem_of

aten, prims = torch.ops.aten, torch.ops.prims
T = TypeVar("T")


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


def seen_after_counting(look: Callable[[DraftGraph], T], function: Callable[..., Any], *arguments: Tensor) -> T:
    """What `look` finds in the drafts of a function's joint graph once loads and operations are counted."""
    found: list[T] = []

    def spy(graph: DraftGraph) -> None:
        count_reads(graph)
        found.append(look(graph))

    with mock.patch.object(build, "PASSES", (spy, *build.PASSES[1:])):
        problem_of(function, *arguments)
    return found[0]


def by_rules(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[int, int]:
    """The same by our rules, of the function's forward."""

    def of_result(graph: DraftGraph) -> tuple[int, int]:
        (output,) = graph.joint.module.graph.find_nodes(op="output")
        (last,) = [draft for draft in graph.values if draft.node in output.args[0]]
        expression = last.sources[0].expression
        return ops_in(expression), len(expression.reads)

    return seen_after_counting(of_result, lambda *given: function(*given).cumsum(0), *arguments)


def expressions(function: Callable[..., Any], *arguments: Tensor) -> dict[str, int]:
    """For each value of a function, how many operations its expression has."""
    return seen_after_counting(
        lambda graph: {draft.node.name: ops_in(draft.expression) for draft in graph.values}, function, *arguments
    )


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


def test_each_reader_of_a_variance_divides_it() -> None:
    """A load, 0, 4, their difference, the larger of it and 0, the division, 1e-5, the addition, the root: 9 for Inductor."""

    def function(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x.sin(), dim=-1, correction=0, keepdim=True)
        return torch.rsqrt(variance + 1e-5) * mean

    assert expressions(function, torch.ones(4, 4, requires_grad=True))["rsqrt"] == 9


def test_a_tensor_of_another_type_is_converted_first() -> None:
    """Two loads, one conversion for both readers, a product and a sum; the numbers 2.0 of two types are two."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x * y + x) * 2.0 - (x * 2.0)

    x, y = torch.ones(4, dtype=torch.bfloat16, requires_grad=True), torch.ones(4, requires_grad=True)
    found = expressions(function, x, y)
    assert (found["mul"], found["add"]) == (4, 5)
    assert (
        found["sub"] == 5 + 2 + 2 + 1 + 1
    )  # two products with their numbers, a conversion of the second, the difference
