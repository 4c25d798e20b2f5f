# ruff: noqa: E501
"""Regions in slices: what is computed where, and the same numbers for each kind of loss and for each number of slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from compile_remat._torch import joint_graph
from compile_remat.cost_models.operators.ops import is_view
from compile_remat.passes.graph.slices.calls import is_sliced
from compile_remat.passes.graph.slices.largest import SlicedGraph, slice_largest
from tests.passes.joint import Traced, check_rewrite, copy_of, joint_of, lines_with, text

ROWS, WIDTH, WORDS = 12, 4, 64


def traced(function: Callable[..., Any], *arguments: Any) -> Traced:
    """The joint graph as Inductor decomposes it."""
    return joint_of(function, *arguments, decompositions=select_decomp_table())


def slicing(slices: int, num_fwd_outputs: int = 1) -> Callable[[fx.GraphModule], SlicedGraph]:
    """The rewrite; AOTAutograd's module is rewritten in place."""

    def rewrite(module: fx.GraphModule) -> SlicedGraph:
        return slice_largest(module, slices, num_fwd_outputs=num_fwd_outputs)

    return rewrite


def tokens(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels, one of which is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(WORDS, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (rows,), generator=generator)
    labels[1] = -100
    return hidden, head, labels


def loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), labels)


def test_the_forward_and_the_backward_are_a_sliced_call_each() -> None:
    """The backward takes over the maxima and the sums of each row's exponentials, and makes the logits again."""
    done = check_rewrite(traced(loss, *tokens()), slicing(4))
    assert [(p.name, p.slices) for p in done.result.products] == [("mm", 4)]
    assert_expected_inline(
        lines_with(done.module.graph, "run_slices"),
        """\
run_slices_1 = run_slices(sliced_body_1, None, 12, 3, (-1, 0, 0), (0, 0, 0), primals_2, primals_1, where)
getitem_2: f32[12, 1] = getitem(run_slices_1, 0)
getitem_3: f32[12, 1] = getitem(run_slices_1, 1)
getitem_4: f32[12, 1] = getitem(run_slices_1, 2)
run_slices = run_slices(sliced_body_0, None, 12, 3, (-1, 0, 0, 0, 0, 0), (0,), primals_2, primals_1, getitem_2, getitem_3, where_2, where_3)
getitem: f32[12, 4] = getitem(run_slices, 0)
getitem_1: f32[64, 4] = getitem(run_slices, 1)
return div, getitem, permute_4, None""",
    )
    first, second = (node for node in done.module.graph.nodes if is_sliced(node))
    assert_expected_inline(
        _body(done.module, first),
        """\
permute_default: f32[4, 64] = aten.permute(operand_0, [1, 0])
mm_default: f32[3, 64] = aten.mm(operand_1, permute_default)
amax_default: f32[3, 1] = aten.amax(mm_default, [1], True)
sub_tensor: f32[3, 64] = aten.sub(mm_default, amax_default)
exp_default: f32[3, 64] = aten.exp(sub_tensor)
sum_dim_int_list: f32[3, 1] = aten.sum(exp_default, [1], True)
log_default: f32[3, 1] = aten.log(sum_dim_int_list)
sub_tensor_1: f32[3, 64] = aten.sub(sub_tensor, log_default)
unsqueeze_default: i64[3, 1] = aten.unsqueeze(operand_2, 1)
gather_default: f32[3, 1] = aten.gather(sub_tensor_1, 1, unsqueeze_default)
return amax_default, log_default, gather_default""",
    )
    assert_expected_inline(
        _body(done.module, second),
        """\
permute_default: f32[4, 64] = aten.permute(operand_0, [1, 0])
mm_default: f32[3, 64] = aten.mm(operand_1, permute_default)
sub_tensor: f32[3, 64] = aten.sub(mm_default, operand_2)
sub_tensor_1: f32[3, 64] = aten.sub(sub_tensor, operand_3)
alias_default: f32[3, 64] = aten.alias(sub_tensor_1)
full_default: f32[3, 64] = aten.full([3, 64], 0, dtype=torch.float32, pin_memory=False)
scatter_value: f32[3, 64] = aten.scatter(full_default, 1, operand_4, -1.0)
mul_tensor: f32[3, 64] = aten.mul(scatter_value, operand_5)
alias_default_1: f32[3, 64] = aten.alias(alias_default)
exp_default: f32[3, 64] = aten.exp(alias_default_1)
sum_dim_int_list: f32[3, 1] = aten.sum(mul_tensor, [1], True)
mul_tensor_1: f32[3, 64] = aten.mul(exp_default, sum_dim_int_list)
sub_tensor_2: f32[3, 64] = aten.sub(mul_tensor, mul_tensor_1)
permute_default_1: f32[64, 3] = aten.permute(sub_tensor_2, [1, 0])
mm_default_1: f32[64, 4] = aten.mm(permute_default_1, operand_1)
permute_default_2: f32[64, 4] = aten.permute(permute_default, [1, 0])
mm_default_2: f32[3, 4] = aten.mm(sub_tensor_2, permute_default_2)
return mm_default_2, mm_default_1""",
    )


def _body(module: fx.GraphModule, call: fx.Node) -> str:
    attribute = call.args[0]
    assert isinstance(attribute, fx.Node)
    body = module.get_submodule(str(attribute.target))
    assert isinstance(body, fx.GraphModule)
    return text(body.graph)


def smoothed(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), labels, label_smoothing=0.1, reduction="sum")


def with_z_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ head.t()
    return F.cross_entropy(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def weighted(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    per_token = F.cross_entropy((hidden @ head.t()).float(), labels, reduction="none")
    return (per_token * torch.arange(len(labels)).cos()).sum()


def with_bias(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head, head.sum(1)), labels)


def tied(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden + F.embedding(labels.clamp(0), head)) @ head.t(), labels)


def class_weights(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), labels, weight=torch.linspace(0.5, 2, len(head)).to(head))


def shifted(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    logits = hidden.view(2, -1, WIDTH) @ head.t()
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS).float(), labels.view(2, -1)[:, 1:].reshape(-1))


LOSSES = (loss, smoothed, with_z_loss, weighted, with_bias, tied, class_weights, shifted)


@pytest.mark.parametrize("slices", [3, 5, 64], ids=["even", "uneven", "one row each"])
@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_losses_have_the_same_gradients(function: Callable[..., Any], slices: int) -> None:
    done = check_rewrite(traced(function, *tokens()), slicing(slices))
    assert [p.slices for p in done.result.products] == [slices] and not done.result.left
    assert sum(map(is_sliced, done.module.graph.nodes)) == 2
    assert not any(_is_wide(node) for node in done.module.graph.nodes), "something as large as the logits is left"


def _is_wide(node: fx.Node) -> bool:
    value = node.meta.get("val")
    is_own = node.op == "call_function" and not is_view(node)
    return is_own and isinstance(value, Tensor) and 2 * value.numel() > ROWS * WORDS


@pytest.mark.parametrize("function", LOSSES, ids=lambda f: f.__name__)
def test_sums_of_bfloat16_gradients_are_added_in_float32(function: Callable[..., Any]) -> None:
    """No further from float64 than the whole graph, but for one rounding of each part."""
    given = tokens(torch.bfloat16)
    whole = traced(function, *given)
    exact = traced(function, *[x.detach().double().requires_grad_() if x.is_floating_point() else x for x in given])
    module = fx.GraphModule(whole.module, whole.module.graph)
    graph = slice_largest(module, 3, num_fwd_outputs=1)
    assert graph.products
    sums = [node for node in graph.module.graph.nodes if is_sliced(node)][-1].meta["val"][-1]
    assert sums.dtype is torch.float32
    made = graph.module(*copy_of(whole.inputs))
    for actual, wanted in zip(made, exact.expected, strict=True):
        if wanted is not None:
            error = (actual.double() - wanted).abs().max() / wanted.abs().max()
            assert error < 2**-6, f"{error} of the largest"


def test_logits_that_are_returned_are_not_in_slices() -> None:
    def both(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ head.t()
        return F.cross_entropy(logits, labels), logits

    given = traced(both, *tokens())
    before = text(joint_graph.prepare(given.module, num_fwd_outputs=2).module.graph)
    done = check_rewrite(given, slicing(4, num_fwd_outputs=2))
    (refusal,) = done.result.left
    assert refusal.is_output and refusal.reason == "mm is an output of the graph"
    assert refusal.nbytes == 4 * ROWS * WORDS
    assert done.after == before


@pytest.mark.parametrize(
    "mixing",
    [
        lambda logits: logits.cumsum(0),
        lambda logits: logits - logits.mean(0, keepdim=True),
        lambda logits: F.dropout(logits),
        lambda logits: logits.flip(0),
        lambda logits: logits / logits.square().sum(),
        lambda logits: logits.sort(0).values,
        lambda logits: logits @ logits[:WORDS].t() @ logits,
    ],
    ids=["cumsum", "mean of rows", "random", "order", "sum of all", "sort", "Gram matrix"],
)
def test_rows_that_meet_are_not_in_slices(mixing: Callable[[Tensor], Tensor]) -> None:
    """The graph stays as it is, and what stands in the way is named."""

    def function(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(mixing(hidden @ head.t()), labels)

    given = traced(function, *tokens())
    graph = slice_largest(given.module, 4, num_fwd_outputs=1)
    assert not graph.products and graph.left[0].reason
    assert not any(map(is_sliced, graph.module.graph.nodes))


def test_a_tensor_that_must_be_saved_is_not_in_slices() -> None:
    given = traced(loss, *tokens())
    logits = next(node for node in given.module.graph.nodes if node.name == "mm")
    logits.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    graph = slice_largest(given.module, 4, num_fwd_outputs=1)
    assert not graph.products and graph.left[0].reason == "mm is tagged MUST_SAVE"


def test_an_input_that_the_forward_overwrites_is_not_read_by_slices() -> None:
    """The backward's slices would read what is there afterwards."""

    def function(hidden: Tensor, head: Tensor, labels: Tensor, shift: Tensor) -> Tensor:
        made = F.cross_entropy(hidden @ head.t() + shift, labels)
        shift.add_(1)
        return made

    given = traced(function, *tokens(), torch.ones(WORDS))
    graph = slice_largest(given.module, 4, num_fwd_outputs=given.num_fwd_outputs)
    assert not graph.products
    assert graph.left[0].reason == "the forward overwrites an input that the slices read"


def gelu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down).square().mean()


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (x @ up).chunk(2, -1)
    return ((F.silu(gate) * value) @ down[: len(down) // 2]).square().mean()


def experts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two experts with half of the tokens each."""
    given = x.view(2, -1, WIDTH)
    return (torch.relu(given @ torch.stack([up, 2 * up])) @ torch.stack([down, -down])).square().mean()


def heads(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Three narrow parts of one product, which attention reads, forward and backward."""
    q, k, v = (x @ up[:, : 3 * WIDTH]).chunk(3, -1)
    return (x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v).square().mean()


def uneven_parts(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A narrow part and a wide one, and moments of rows that nothing wide reads."""
    wide = x @ up
    narrow, rest = wide.split([WIDTH, 15 * WIDTH], -1)
    return (x + narrow + torch.relu(rest) @ down[WIDTH:]).square().mean() + torch.var_mean(rest, -1)[0].sum()


@pytest.mark.parametrize("slices", [2, 5], ids=["even", "uneven"])
@pytest.mark.parametrize("function", [gelu, swiglu, experts, heads, uneven_parts], ids=lambda f: f.__name__)
def test_layers_have_the_same_gradients(function: Callable[..., Any], slices: int) -> None:
    """Parts of a wide tensor are handed over one by one."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 6, WIDTH), (WIDTH, 16 * WIDTH), (16 * WIDTH, WIDTH)]
    done = check_rewrite(
        traced(function, *(torch.randn(*s, generator=generator).requires_grad_() for s in sizes)), slicing(slices)
    )
    num_calls = 1 if function is heads else 2  # with attention, the forward alone has a call
    assert done.result.products and sum(map(is_sliced, done.module.graph.nodes)) == num_calls
