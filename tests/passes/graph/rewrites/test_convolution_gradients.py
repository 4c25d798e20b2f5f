"""A convolution's gradients one after the other: what is split and what stays, the same numbers, one layout, prices, peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_function, default_partition, nop
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

import compile_remat
from compile_remat._torch import joint_graph
from compile_remat.api import look
from compile_remat.backend import remat
from compile_remat.cost_models import OpKind, Roofline, UnitCost, describe, load_device
from compile_remat.passes import Planner, build_problem
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.rewrites.convolution_gradients import (
    lay_gradients_out_once,
    split_convolution_gradients,
)
from tests.passes.joint import BeforeAfter, check_rewrite, joint_of

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch's own kernels are not split")


def grad(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def split(module: fx.GraphModule) -> Rewritten:
    return split_convolution_gradients(joint_graph.prepare(module, num_fwd_outputs=1))


def rewritten(function: Callable[..., Any], *inputs: Tensor, start: str = "") -> BeforeAfter:
    return check_rewrite(joint_of(function, *inputs, decompositions={}), split, start=start)


def two_layers(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(torch.tanh(F.conv2d(x, v, padding=1)), w, b, stride=2)


LAYERS = ((2, 3, 8, 8), (4, 3, 3, 3), (5, 4, 3, 3), (5,))


def test_golden_order() -> None:
    """`tanh` is dead when the convolution runs that gives the gradient of its size; one more row makes it 8 x 8."""
    done = rewritten(two_layers, *(grad(*shape) for shape in LAYERS), start="convolution_1")
    assert done.result.count == 2
    assert_expected_inline(
        done.before,
        """\
convolution_1: f32[2, 5, 3, 3] = aten.convolution(tanh, primals_3, primals_4, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
convolution_backward = aten.convolution_backward(tangents_1, tanh, primals_3, [5], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True])
getitem: f32[2, 4, 8, 8] = getitem(convolution_backward, 0)
getitem_1: f32[5, 4, 3, 3] = getitem(convolution_backward, 1)
getitem_2: f32[5] = getitem(convolution_backward, 2)
detach_1: f32[2, 4, 8, 8] = aten.detach(detach)
tanh_backward: f32[2, 4, 8, 8] = aten.tanh_backward(getitem, detach_1)
convolution_backward_1 = aten.convolution_backward(tanh_backward, primals_1, primals_2, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
getitem_3: f32[2, 3, 8, 8] = getitem(convolution_backward_1, 0)
getitem_4: f32[4, 3, 3, 3] = getitem(convolution_backward_1, 1)
return convolution_1, getitem_3, getitem_4, getitem_1, getitem_2""",  # noqa: E501
    )
    assert_expected_inline(
        done.after,
        """\
convolution_1: f32[2, 5, 3, 3] = aten.convolution(tanh, primals_3, primals_4, [2, 2], [0, 0], [1, 1], False, [0, 0], 1)
convolution_backward = aten.convolution_backward(tangents_1, tanh, primals_3, [5], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
getitem_1: f32[5, 4, 3, 3] = getitem(convolution_backward, 1)
getitem_2: f32[5] = getitem(convolution_backward, 2)
convolution_default: f32[2, 4, 8, 8] = aten.convolution(tangents_1, primals_3, None, [2, 2], [0, 0], [1, 1], True, [1, 1], 1)
detach_1: f32[2, 4, 8, 8] = aten.detach(detach)
tanh_backward: f32[2, 4, 8, 8] = aten.tanh_backward(convolution_default, detach_1)
convolution_backward_1 = aten.convolution_backward(tanh_backward, primals_1, primals_2, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
getitem_4: f32[4, 3, 3, 3] = getitem(convolution_backward_1, 1)
convolution_default_1: f32[2, 3, 8, 8] = aten.convolution(tanh_backward, primals_2, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
return convolution_1, convolution_default_1, getitem_4, getitem_1, getitem_2""",  # noqa: E501
    )


def test_frozen_weights_need_nothing_that_the_convolution_read() -> None:
    done = rewritten(lambda x, w: torch.tanh(F.conv2d(torch.sin(x), w)), grad(2, 3, 8, 8), torch.randn(4, 3, 3, 3))
    assert done.result.count == 1
    assert not done.module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)


def in_autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.conv2d(x, w, padding=1).sin()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (in_autocast, (grad(2, 3, 8, 8), grad(4, 3, 3, 3))),
        (F.conv2d, (grad(2, 3, 8, 8, dtype=torch.bfloat16), grad(4, 3, 3, 3, dtype=torch.bfloat16))),
        (F.conv2d, (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_(), grad(4, 3, 3, 3))),
    ],
    ids=["autocast", "bfloat16", "channels_last"],
)
def test_types_and_layouts_that_are_split(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    assert rewritten(function, *inputs).result.count == 1


def test_complex_convolutions_are_real_ones() -> None:
    def squared(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w).abs().square()

    done = rewritten(squared, *(grad(*s, dtype=torch.complex64) for s in ((1, 2, 6, 6), (3, 2, 3, 3))))
    assert done.result.count == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_torchs_own_kernels_compute_stays(dtype: torch.dtype) -> None:
    traced = joint_of(F.conv2d, grad(1, 2, 6, 6, dtype=dtype), grad(3, 2, 3, 3, dtype=dtype), decompositions={})
    assert split(traced.module).count == 0


def test_without_onednn_nothing_is_split() -> None:
    traced = joint_of(F.conv2d, grad(1, 2, 6, 6), grad(3, 2, 3, 3), decompositions={})
    with torch.backends.mkldnn.flags(enabled=False):
        assert split(traced.module).count == 0


def test_sizes_that_are_symbols_stay() -> None:
    found: list[int] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        found.append(split(joint).count)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    aot_function(F.conv2d, nop, nop, partition_fn=partition, decompositions={}, dynamic=True)(
        grad(4, 3, 9, 9), grad(5, 3, 3, 3)
    )
    assert found == [0]


@settings(max_examples=40)
@given(st.data())
def test_any_convolution_is_split_and_has_the_same_numbers(data: st.DataObject) -> None:
    """Kernels, strides, paddings, dilations, groups, one to three dimensions, transposed or not, empty batches, a bias."""
    draw = data.draw
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims)))

    kernel, stride, padding, dilation, size = each(1, 3), each(1, 3), each(0, 2), each(1, 2), each(4, 9)
    groups, batch, transposed = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 2)), draw(st.booleans())
    extra = each(0, 2) if transposed else (0,) * dims
    assume(all(e < max(s, d) for e, s, d in zip(extra, stride, dilation, strict=True)))
    reaches = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        outs = [
            (n - 1) * s - 2 * p + r + e for n, s, p, r, e in zip(size, stride, padding, reaches, extra, strict=True)
        ]
    else:
        outs = [(n + 2 * p - r) // s + 1 for n, s, p, r in zip(size, stride, padding, reaches, strict=True)]
    assume(min(outs) > 0)
    bias = [grad(4 * groups if transposed else 8)] if draw(st.booleans()) else []

    def function(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return aten.convolution(x, w, b, stride, padding, dilation, transposed, extra, groups)

    weight = grad(4, 4, *kernel) if transposed else grad(8, 4 // groups, *kernel)
    done = rewritten(function, grad(batch, 4, *size), weight, *bias)
    is_too_large = transposed and any(e >= s for e, s in zip(extra, stride, strict=True))
    assert done.result.count == (not is_too_large)  # a convolution would give more elements than were read
    if is_too_large:
        return
    nodes = list(done.module.graph.nodes)
    (backward,) = [n for n in nodes if n.target is aten.convolution_backward.default]
    behind = nodes[-2]
    assert behind.target is aten.convolution.default and backward.args[10][0] is False
    assert tuple(behind.meta["val"].shape) == (batch, 4, *size)


# -- one layout -------------------------------------------------------------------------------------------------------


def pooled(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return two_layers(x, v, w, b).mean((2, 3))


def laid_out(module: fx.GraphModule) -> Rewritten:
    split(module)
    return lay_gradients_out_once(module)


def test_both_operators_read_one_tensor_with_its_channels_innermost() -> None:
    """`expand` and `div` come from a mean: without the operator between, Inductor would copy the gradient twice."""
    inputs = [torch.randn(*shape, requires_grad=k > 0) for k, shape in enumerate(LAYERS)]
    done = check_rewrite(joint_of(pooled, *inputs, decompositions={}), laid_out, start="unsqueeze")
    assert done.result.count == 1
    assert_expected_inline(
        done.after,
        """\
unsqueeze: f32[2, 5, 1] = aten.unsqueeze(tangents_1, 2)
unsqueeze_1: f32[2, 5, 1, 1] = aten.unsqueeze(unsqueeze, 3)
expand: f32[2, 5, 3, 3] = aten.expand(unsqueeze_1, [2, 5, 3, 3])
div: f32[2, 5, 3, 3] = aten.div(expand, 9)
inductor_force_stride_order_default: f32[2, 5, 3, 3] = prims.inductor_force_stride_order(div, [45, 1, 15, 5])
convolution_backward = aten.convolution_backward(inductor_force_stride_order_default, tanh, primals_3, [5], [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
getitem_1: f32[5, 4, 3, 3] = getitem(convolution_backward, 1)
getitem_2: f32[5] = getitem(convolution_backward, 2)
convolution_default: f32[2, 4, 8, 8] = aten.convolution(inductor_force_stride_order_default, primals_3, None, [2, 2], [0, 0], [1, 1], True, [1, 1], 1)
detach_1: f32[2, 4, 8, 8] = aten.detach(detach)
tanh_backward: f32[2, 4, 8, 8] = aten.tanh_backward(convolution_default, detach_1)
convolution_backward_1 = aten.convolution_backward(tanh_backward, primals_1, primals_2, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
getitem_4: f32[4, 3, 3, 3] = getitem(convolution_backward_1, 1)
return mean, None, getitem_4, getitem_1, getitem_2""",  # noqa: E501
    )


@pytest.mark.parametrize("function", [F.conv1d, F.conv3d])
def test_other_dimensions_have_no_such_layout(function: Callable[..., Tensor]) -> None:
    dims = 1 if function is F.conv1d else 3
    inputs = grad(2, 3, *[5] * dims), grad(4, 3, *[3] * dims)
    assert check_rewrite(joint_of(function, *inputs, decompositions={}), laid_out).result.count == 0


# -- prices and peaks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["h100-sxm", "cpu"])
@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (lambda x, w: F.conv2d(x, w, padding=1), (64, 64, 3, 3)),
        (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (64, 16, 3, 3)),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2), (64, 32, 2, 2)),
    ],
)
def test_both_pieces_together_cost_what_the_operator_cost(
    function: Callable[..., Tensor], weight: tuple[int, ...], device: str
) -> None:
    """Operations and bytes are equal; in time a launch is added, and one piece may wait for memory where the other computes."""
    cost = Roofline(load_device(device))
    traced = joint_of(function, grad(16, 64, 64, 64), grad(*weight), decompositions={})

    def backwards() -> tuple[tuple[int, int, int], int]:
        joint = joint_graph.prepare(traced.module, num_fwd_outputs=1)
        nodes = [n for n in joint.module.graph.nodes if n in joint.info.tangents_closure and n.op == "call_function"]
        ops = [describe(node) for node in nodes]
        work = ((op.flops, op.read_bytes, op.write_bytes) for op in ops if op.kind is OpKind.CONV)
        flops, read_bytes, write_bytes = map(sum, zip(*work, strict=True))
        return (flops, read_bytes, write_bytes), sum(map(cost.op_time_ns, ops))

    counts, time_ns = backwards()
    assert split(traced.module).count == 1
    split_counts, split_time_ns = backwards()
    assert split_counts == counts
    assert time_ns <= split_time_ns < 1.2 * time_ns


class Net(nn.Module):
    """Convolutions and a mean; no activation's gradient needs what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 32), (32, 32), (32, 32), (32, 32)))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.mean((2, 3))


def test_the_lowest_peak_is_lower_than_with_both_gradients_at_once() -> None:
    net, x = Net(), torch.randn(8, 3, 32, 32)

    names = [name for name, _ in net.named_parameters()]

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))
        return out

    peaks = []
    for split_first in (False, True):
        traced = joint_of(loss, x, *(p.detach().requires_grad_() for p in net.parameters()), decompositions={})
        joint = joint_graph.prepare(traced.module, num_fwd_outputs=1)
        if split_first:
            assert split_convolution_gradients(joint).count == 3  # the first one's input needs no gradient
        peaks.append(Planner(build_problem(joint, cost=UnitCost())).lowest().peak_bytes)
    assert peaks[1] < 0.8 * peaks[0]


@pytest.mark.usefixtures("empty_kernels")
def test_the_lowest_peak_is_that_of_the_code() -> None:
    """Also where the gradient comes from a mean, which makes it in another layout than convolutions read."""
    torch.compile(Net(), backend=remat, options={"memory_budget": "min"})(torch.randn(8, 3, 32, 32)).sum().backward()
    (report,) = compile_remat.reports()
    assert report.scheduled_peak_bytes == report.predicted_peak_bytes


def test_under_max_the_operators_are_torchs_own() -> None:
    for budget, is_split in (("max", False), (1.0, False), (0.9, True)):
        (planned,) = look(Net(), [torch.randn(2, 3, 32, 32)], memory_budget=budget)
        found = planned.joint.module.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
        assert any(node.args[10][0] for node in found) is not is_split, budget
