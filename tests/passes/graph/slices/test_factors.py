"""Gradients in the forward for an incoming gradient of 1: the same numbers for each loss, and which losses have none."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat.passes import SlicedProduct
from compile_remat.passes.graph.slices.calls import is_sliced
from compile_remat.passes.graph.slices.largest import SlicedGraph, slice_largest, slice_products
from tests.passes.graph.slices.test_slicing import (
    LOSSES,
    WIDTH,
    _is_wide,
    experts,
    gelu,
    loss,
    swiglu,
    tokens,
    traced,
)
from tests.passes.joint import Traced, check_rewrite, copy_of, lines_with, results

AT_ONCE = (SlicedProduct("mm", 4, at_once=True),)


def at_once(slices: int) -> Callable[[fx.GraphModule], SlicedGraph]:
    """The rewrite; AOTAutograd's module is rewritten in place."""

    def rewrite(module: fx.GraphModule) -> SlicedGraph:
        return slice_largest(module, slices, num_fwd_outputs=1, at_once=True)

    return rewrite


def rewritten(given: Traced) -> SlicedGraph:
    """The graph in 4 slices, with gradients in the forward where that is possible."""
    module = copy.deepcopy(given.module)
    return slice_largest(module, 4, num_fwd_outputs=given.num_fwd_outputs, at_once=True)


def reason_of(given: Traced) -> str:
    """The reason why no gradients of a graph are in the forward; then they are in the backward."""
    module = copy.deepcopy(given.module)
    graph = slice_products(module, AT_ONCE, num_fwd_outputs=given.num_fwd_outputs)
    assert not graph.products and not any(map(is_sliced, graph.module.graph.nodes))
    assert not any(product.at_once for product in rewritten(given).products)
    (refusal,) = graph.left
    return refusal.reason


def with_tangent(given: Traced, value: float) -> list[Any]:
    """The inputs, with another incoming gradient of the only output."""
    return [*given.inputs[:-1], torch.full_like(given.inputs[-1], value)]


def test_the_forward_computes_gradients_for_one_and_the_backward_scales_them() -> None:
    """The count of labels divides in the forward, as the whole graph does: only the tangent is left to the backward."""
    done = check_rewrite(traced(loss, *tokens()), at_once(4))
    assert done.result.products == AT_ONCE
    assert_expected_inline(
        lines_with(done.module.graph, "run_slices", "full_default", "tangents_1"),
        """\
full_default: f32[] = aten.full([], 1, dtype=torch.float32)
div_2: f32[] = aten.div(full_default, convert_element_type)
run_slices = run_slices(sliced_body_0, None, 12, 3, (-1, 0, 0, 0, 0), (0, 0), primals_2, primals_1, where, where_2, where_4)
getitem: f32[12, 1] = getitem(run_slices, 0)
getitem_1: f32[12, 4] = getitem(run_slices, 1)
getitem_2: f32[64, 4] = getitem(run_slices, 2)
mul_tensor: f32[12, 4] = aten.mul(getitem_1, tangents_1)
mul_tensor_1: f32[64, 4] = aten.mul(getitem_2, tangents_1)
return div, mul_tensor, permute_4, None""",
    )


@pytest.mark.parametrize("slices", [3, 5, 64], ids=["even", "uneven", "one row each"])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_losses_have_the_same_gradients(function: Callable[..., Any], slices: int) -> None:
    done = check_rewrite(traced(function, *tokens()), at_once(slices))
    assert [(p.slices, p.at_once) for p in done.result.products] == [(slices, True)] and not done.result.left
    assert sum(map(is_sliced, done.module.graph.nodes)) == 1
    assert not any(_is_wide(node) for node in done.module.graph.nodes), "something as large as the logits is left"


@pytest.mark.parametrize("value", [0.0, 1 / 8, -3.0, 65536.0])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_gradients_are_scaled_by_what_comes_in(function: Callable[..., Any], value: float) -> None:
    """By 0, by the share of a batch that is accumulated, by a loss's scale."""
    given = traced(function, *tokens())
    graph = rewritten(given)
    assert graph.products[0].at_once
    _, *made = results(graph.module, with_tangent(given, value))
    for actual, wanted in zip(made, given.expected[1:], strict=True):
        if wanted is not None:
            assert actual is not None
            torch.testing.assert_close(actual, value * wanted, rtol=1.3e-6, atol=1e-5 * max(1, abs(value)))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_what_is_not_finite_stays_so(function: Callable[..., Any], value: float) -> None:
    """So a scaler that looks for infinities sees them; rows of ignored labels are 0 in the whole graph, and NaN here."""
    given = traced(function, *tokens())
    inputs = with_tangent(given, value)
    whole, made = results(given.module, inputs), results(rewritten(given).module, inputs)
    for actual, wanted in zip(made, whole, strict=True):
        if wanted is not None:
            assert actual is not None and not (wanted.isfinite() < actual.isfinite()).any()


def test_where_all_labels_are_ignored_gradients_are_zero() -> None:
    """As those of the whole graph, although the loss is 0 / 0."""
    hidden, head, labels = tokens()
    given = traced(loss, hidden, head, torch.full_like(labels, -100))
    graph = rewritten(given)
    assert graph.products[0].at_once
    for made in (results(graph.module, given.inputs), results(given.module, given.inputs)):
        assert made[0] is not None and made[0].isnan()
        assert all(x is None or not x.any() for x in made[1:])


@pytest.mark.parametrize("value", [1.0, 1 / 3])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_bfloat16_gradients_are_as_near_to_float64(function: Callable[..., Any], value: float) -> None:
    """Under the tolerance of slices whose gradients are in the backward."""
    given = tokens(torch.bfloat16)
    whole = traced(function, *given)
    exact = traced(function, *[x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given])
    graph = rewritten(whole)
    assert graph.products[0].at_once
    made = graph.module(*copy_of(with_tangent(whole, value)))
    for actual, wanted in zip(made[1:], exact.expected[1:], strict=True):
        if wanted is not None:
            error = (actual.double() - value * wanted).abs().max() / (value * wanted).abs().max()
            assert error < 2**-6, f"{error} of the largest"


def test_a_loss_that_is_returned_twice() -> None:
    """The tangents of both are added up before they reach the slices."""

    def twice(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        value = loss(hidden, head, labels)
        return value, 3 * value

    given = traced(twice, *tokens())
    graph = rewritten(given)
    assert graph.products == AT_ONCE
    for actual, wanted in zip(results(graph.module, given.inputs), given.expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("function", [gelu, swiglu, experts], ids=lambda f: f.__name__)
def test_layers_have_the_same_gradients(function: Callable[..., Any]) -> None:
    """A layer before the loss; what lies between its forward and its backward is computed in the slices, too."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 6, WIDTH), (WIDTH, 16 * WIDTH), (16 * WIDTH, WIDTH)]
    done = check_rewrite(
        traced(function, *(torch.randn(*s, generator=generator).requires_grad_() for s in sizes)), at_once(3)
    )
    assert done.result.products[0].at_once


# -- losses whose gradients are no multiples ----------------------------------------------------------------------------


def of_tokens(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), labels, reduction="none")


def squared(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return loss(hidden, head, labels).square()


def two_losses(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.t()
    return F.cross_entropy(logits, labels), torch.logsumexp(logits, -1).square().mean()


class Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-1e-3, 1e-3)


class Shifted(Clipped):
    """The identity, whose gradient is moved."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + 1


class Squared(Clipped):
    """The identity, whose gradient is squared."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * gradient


class Chosen(Clipped):
    """The identity, whose gradient depends on its sign."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.where(gradient > 0, gradient, 0)


def through(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """The loss of logits that go through a function."""

    def changed(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(function.apply(hidden @ head.t()), labels)

    return changed


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (of_tokens, "the incoming gradient is not one number"),
        (two_losses, "the incoming gradient is not one number"),
        (squared, "adds up rows|needs all rows"),
        (through(Clipped), r"clamp.* may not be a multiple of the incoming gradient"),
        (through(Shifted), r"add .* may not be a multiple of the incoming gradient"),
        (through(Squared), r"mul .* may not be a multiple of the incoming gradient"),
        (through(Chosen), r"(gt|where) .* may not be a multiple of the incoming gradient"),
    ],
    ids=["of tokens", "two losses", "squared", "clipped", "moved", "squared in the backward", "by sign"],
)
def test_gradients_that_are_no_multiples_stay_in_the_backward(function: Callable[..., Any], reason: str) -> None:
    assert re.search(reason, reason_of(traced(function, *tokens())))


def test_float16_stays_in_the_backward() -> None:
    """Its users scale the loss because gradients underflow; the gradient for 1 would."""

    def half(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ head.t()).float(), labels)

    reason = reason_of(traced(half, *tokens(torch.float16)))
    assert reason.endswith("is of float16, in which gradients for 1 may underflow")


def test_an_overwritten_input_keeps_gradients_in_the_backward() -> None:
    """Even one that the slices do not read: nodes change their order."""

    def counting(hidden: Tensor, head: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        made = loss(hidden, head, labels)
        count.add_(1)
        return made

    given = traced(counting, *tokens(), torch.zeros(()))
    assert reason_of(given) == "the forward overwrites an input"
    assert rewritten(given).products == (SlicedProduct("mm", 4),)


def test_a_frozen_head_has_the_gradient_of_the_hidden_states_alone() -> None:
    hidden, head, labels = tokens()
    given = traced(loss, hidden, head.detach(), labels)
    graph = rewritten(given)
    assert graph.products == AT_ONCE
    torch.testing.assert_close(results(graph.module, given.inputs)[1], given.expected[1])
