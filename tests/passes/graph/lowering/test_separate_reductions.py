"""Reductions that have kernels of their own, read from joint graphs of an H100 that is not there.

The code that Inductor emits for such graphs is checked against their prices in tests/cuda_codegen/test_priced.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from compile_remat._torch.codegen_rules import InductorRules, inductor_rules
from compile_remat._torch.fake import say_device
from compile_remat.cost_models import UnitCost
from compile_remat.passes import build_problem
from compile_remat.passes.graph import build
from compile_remat.passes.graph.lowering.separate_reductions import Loops
from compile_remat.passes.graph.node_drafts import Draft
from tests.passes.joint import joint_of

RULES = replace(inductor_rules("cuda"), mixes_reductions=True)


def drafts_of(
    function: Callable[..., Any], *arguments: Tensor, device: str = "cuda", rules: InductorRules = RULES
) -> list[Draft]:
    """The drafts of a joint graph, as they are priced."""
    traced = joint_of(function, *arguments)
    if device != "cpu":
        say_device(traced.module, torch.device(device, 0))
    with mock.patch.object(build, "price", return_value=0) as price:
        build_problem(
            traced.module, num_fwd_outputs=traced.num_fwd_outputs, cost=UnitCost(), rules=lambda device_type: rules
        )
    values, steps = price.call_args.args[:2]
    return [*values, *steps]


def separate(function: Callable[..., Any], *arguments: Tensor, **options: Any) -> list[str]:
    """Names of the nodes with kernels of their own."""
    return [draft.node.name for draft in drafts_of(function, *arguments, **options) if draft.is_separate]


def tensor(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


# -- by what is kept --------------------------------------------------------------------------------------------------


def test_a_norm_of_rows_is_one_kernel_and_its_weights_gradient_another() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight)

    drafts = drafts_of(norm, tensor(16, 32), tensor(32))
    reductions = [draft for draft in drafts if draft.kernel == "reduction"]
    assert [draft.node.name for draft in reductions] == ["native_layer_norm", "sum_1", "sum_2", "sum_3"]
    assert [draft.is_separate for draft in reductions] == [False, False, False, True]


def test_statistics_of_columns_are_kernels_of_their_own() -> None:
    assert separate(lambda x: x / x.sum(0, keepdim=True), tensor(16, 32)) == ["sum_1", "sum_2"]
    assert separate(lambda x: x / x.sum(1, keepdim=True), tensor(16, 32)) == []


def test_the_layout_in_memory_decides() -> None:
    """The rows of a transposed operand are its buffer's columns."""
    assert separate(lambda x: x.t() / x.t().sum(1, keepdim=True), tensor(16, 32)) == ["sum_1", "sum_2"]
    assert separate(lambda x: x.t() / x.t().sum(0, keepdim=True), tensor(16, 32)) == []


@pytest.mark.parametrize("is_fake", [False, True])
def test_a_view_that_the_layout_does_not_allow_is_of_a_copy(is_fake: bool) -> None:
    """A convolution's result lies with its channels innermost; its rows of 16 elements are only in a contiguous copy."""

    def rows(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.conv2d(x, weight).reshape(1024, 16)
        return y / y.sum(1, keepdim=True)

    rules = replace(inductor_rules("cpu"), has_channels_last=True)
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext():
        drafts = drafts_of(rows, tensor(4, 16, 16, 16), tensor(16, 16, 1, 1), device="cpu", rules=rules)
    assert any(draft.is_channels_last for draft in drafts) and not any(draft.is_separate for draft in drafts)


def test_dimensions_of_one_element_do_not_count() -> None:
    assert separate(lambda x: x / x.sum(0, keepdim=True), tensor(1, 32)) == []


def test_operators_of_as_many_results_as_elements_are_in_no_kernel_of_their_own() -> None:
    assert separate(lambda x: x * x.cumsum(0), tensor(16, 32)) == []


# -- by what is read --------------------------------------------------------------------------------------------------


def test_a_reduction_of_results_is_a_kernel_of_its_own() -> None:
    """The mean of the losses of rows cannot be in the kernel of the rows."""
    assert separate(lambda x: x.sin().sum(1).exp().sum(), tensor(16, 32)) == ["sum_2"]


def test_a_second_reduction_along_the_same_rows_is_in_the_kernel() -> None:
    """A softmax: the maximum of a row, then the sum of what depends on it."""
    assert separate(lambda x: torch.softmax(x, -1), tensor(16, 32)) == []


def test_a_short_sum_of_results_is_unrolled_and_a_kernel_of_its_own() -> None:
    """Four results of the first sum make one of the second: the groups' means of a GroupNorm's gradients."""
    few = RULES.unrolled_below - 4
    assert separate(lambda x: x.sin().sum(2).exp().sum(1), tensor(16, few, 64)) == ["sum_2"]
    assert separate(lambda x: x.sin().exp().sum(1), tensor(16, few, 64)) == []


# -- by size ----------------------------------------------------------------------------------------------------------


def test_few_results_of_long_rows_are_split() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x / x.sum(1, keepdim=True)

    x = tensor(4, 64)
    whole, split = replace(RULES, unsplit_length=64), replace(RULES, unsplit_length=63)
    assert separate(scaled, x, rules=whole) == []
    assert separate(scaled, x, rules=split) == ["sum_1", "sum_2"]
    assert separate(scaled, x, rules=replace(split, split_below=4)) == []


def test_the_processor_splits_nothing() -> None:
    assert inductor_rules("cpu").split_below == 0
    assert not Loops(1, 10**9, True).is_split(inductor_rules("cpu"))


@pytest.mark.parametrize(
    ("rows", "columns", "is_mixed"),
    [(8192, 1024, True), (8192, 512, False), (4095, 2047, False), (8192, 4097, False), (65536, 2**14 + 1, False)],
    ids=["mixed", "small", "few rows", "wide", "many columns"],
)
def test_sizes_of_mixed_reductions(rows: int, columns: int, is_mixed: bool) -> None:
    over_rows, along_rows = Loops(columns, rows, False), Loops(rows, columns, True)
    assert over_rows.mixes_with(along_rows) == is_mixed
    assert not over_rows.mixes_with(replace(along_rows, num_results=rows + 1))


def test_a_gradient_of_a_weight_joins_the_norms_kernel() -> None:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight)

    x, weight = tensor(8192, 1024), tensor(1024)
    assert separate(norm, x, weight) == []
    assert separate(norm, x, weight, rules=replace(RULES, mixes_reductions=False)) == ["sum_3"]


def test_sums_that_load_other_buffers_are_not_mixed() -> None:
    def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(1), y.cos().sum(0)

    x, y = tensor(8192, 1024), tensor(8192, 1024)
    assert separate(sums, x, y) == ["sum_2"]
    assert separate(lambda x: (x.sin().sum(1), x.cos().sum(0)), x) == []
