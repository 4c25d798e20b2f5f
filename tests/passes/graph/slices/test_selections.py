"""Slices of a product's rows before the product, zeros around its gradient behind the products."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table

from compile_remat.passes.graph.slices.selections import select_rows_first
from tests.passes.joint import check_rewrite, joint_of


def shifted(hidden: Tensor, head: Tensor) -> Tensor:
    return (hidden @ head).float()[:, :-1].exp()


def test_the_last_token_is_left_out_before_the_product() -> None:
    hidden, head = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    done = check_rewrite(joint_of(shifted, hidden, head, decompositions=select_decomp_table()), select_rows_first)
    assert done.result == 2
    assert_expected_inline(
        done.changes,
        """\
- mm: f32[6, 16] = aten.mm(view, primals_2)
- view_1: f32[2, 3, 16] = aten.view(mm, [2, 3, 16])
+ view_default: f32[2, 3, 4] = aten.view(view, [2, 3, 4])
- slice_1: f32[2, 2, 16] = aten.slice(view_1, 1, 0, -1)
+ slice_tensor: f32[2, 2, 4] = aten.slice(view_default, 1, 0, 2, 1)
+ clone_default: f32[2, 2, 4] = aten.clone(slice_tensor, memory_format=torch.contiguous_format)
+ view_default_1: f32[4, 4] = aten.view(clone_default, [4, 4])
+ mm_default: f32[4, 16] = aten.mm(view_default_1, primals_2)
+ view_default_2: f32[2, 2, 16] = aten.view(mm_default, [2, 2, 16])
- exp: f32[2, 2, 16] = aten.exp(slice_1)
+ exp: f32[2, 2, 16] = aten.exp(view_default_2)
+ reshape_default: f32[4, 16] = aten.reshape(mul, [4, 16])
- full: f32[2, 3, 16] = aten.full([2, 3, 16], 0, dtype=torch.float32, pin_memory=False)
- slice_scatter: f32[2, 3, 16] = aten.slice_scatter(full, mul, 1, 0, -1)
- view_2: f32[6, 16] = aten.view(slice_scatter, [6, 16])
- mm_1: f32[4, 16] = aten.mm(permute, view_2)
+ view_default_3: f32[4, 2, 3] = aten.view(permute, [4, 2, 3])
+ slice_tensor_1: f32[4, 2, 2] = aten.slice(view_default_3, 2, 0, 2, 1)
+ clone_default_1: f32[4, 2, 2] = aten.clone(slice_tensor_1, memory_format=torch.contiguous_format)
+ view_default_4: f32[4, 4] = aten.view(clone_default_1, [4, 4])
+ mm_default_1: f32[4, 16] = aten.mm(view_default_4, reshape_default)
- mm_2: f32[6, 4] = aten.mm(view_2, permute_1)
+ mm_default_2: f32[4, 4] = aten.mm(reshape_default, permute_1)
+ view_default_5: f32[2, 2, 4] = aten.view(mm_default_2, [2, 2, 4])
+ full_default: f32[2, 3, 4] = aten.full([2, 3, 4], 0, dtype=torch.float32)
+ slice_scatter_default: f32[2, 3, 4] = aten.slice_scatter(full_default, view_default_5, 1, 0, 2, 1)
+ view_default_6: f32[6, 4] = aten.view(slice_scatter_default, [6, 4])
- view_3: f32[2, 3, 4] = aten.view(mm_2, [2, 3, 4])
+ view_3: f32[2, 3, 4] = aten.view(view_default_6, [2, 3, 4])
- return exp, view_3, mm_1
+ return exp, view_3, mm_default_1""",
    )


def test_nothing_moves_where_all_rows_are_read() -> None:
    def function(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden @ head
        return logits[:, :-1].exp().sum() + logits.square().sum()

    hidden, head = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    done = check_rewrite(joint_of(function, hidden, head, decompositions=select_decomp_table()), select_rows_first)
    assert done.result == 0 and done.before == done.after


def test_columns_are_sliced_behind_the_product() -> None:
    def function(hidden: Tensor, head: Tensor) -> Tensor:
        return (hidden @ head)[..., 1:].exp()

    hidden, head = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    done = check_rewrite(joint_of(function, hidden, head, decompositions=select_decomp_table()), select_rows_first)
    assert done.result == 0 and done.before == done.after
