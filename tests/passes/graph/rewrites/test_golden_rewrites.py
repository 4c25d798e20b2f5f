"""Each rewrite on a graph that can be read at a glance: before, after, and (in `check_rewrite`) the same numbers."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.rewrites.addmm import keep_matmuls_in_place
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.rewrites.shape_only_inputs import replace_shape_only_inputs
from compile_remat.passes.graph.rewrites.weight_gradients_first import move_weight_gradients_up
from tests.passes.joint import check_rewrite, joint_of


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_the_gradient_of_a_weight_is_computed_before_that_of_the_input() -> None:
    """`gelu` dies at mm_1.  Before, the gradient `mm` of its size was made while it was still alive."""

    def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    def rewrite(module: fx.GraphModule) -> Rewritten:
        joint = joint_graph.prepare(module, num_fwd_outputs=1)
        return move_weight_gradients_up(joint.module, joint.info.tangents_closure)

    traced = joint_of(layers, grad(64, 4), grad(32, 4), grad(32), grad(4, 32), grad(4), decompositions={})
    done = check_rewrite(traced, rewrite, start="addmm_1")
    assert done.result.count == 1
    assert_expected_inline(
        done.before,
        """\
addmm_1: f64[64, 4] = aten.addmm(primals_5, gelu, t_1)
t_2: f64[4, 32] = aten.t(t_1)
mm: f64[64, 32] = aten.mm(tangents_1, t_2)
t_3: f64[4, 64] = aten.t(tangents_1)
mm_1: f64[4, 32] = aten.mm(t_3, gelu)
t_4: f64[32, 4] = aten.t(mm_1)
sum_1: f64[1, 4] = aten.sum(tangents_1, [0], True)
view: f64[4] = aten.view(sum_1, [4])
t_5: f64[4, 32] = aten.t(t_4)
gelu_backward: f64[64, 32] = aten.gelu_backward(mm, addmm)
t_6: f64[32, 4] = aten.t(t)
mm_2: f64[64, 4] = aten.mm(gelu_backward, t_6)
t_7: f64[32, 64] = aten.t(gelu_backward)
mm_3: f64[32, 4] = aten.mm(t_7, primals_1)
t_8: f64[4, 32] = aten.t(mm_3)
sum_2: f64[1, 32] = aten.sum(gelu_backward, [0], True)
view_1: f64[32] = aten.view(sum_2, [32])
t_9: f64[32, 4] = aten.t(t_8)
return addmm_1, mm_2, t_9, view_1, t_5, view""",
    )
    assert_expected_inline(
        done.after,
        """\
addmm_1: f64[64, 4] = aten.addmm(primals_5, gelu, t_1)
t_2: f64[4, 32] = aten.t(t_1)
t_3: f64[4, 64] = aten.t(tangents_1)
mm_1: f64[4, 32] = aten.mm(t_3, gelu)
t_4: f64[32, 4] = aten.t(mm_1)
t_5: f64[4, 32] = aten.t(t_4)
mm: f64[64, 32] = aten.mm(tangents_1, t_2)
sum_1: f64[1, 4] = aten.sum(tangents_1, [0], True)
view: f64[4] = aten.view(sum_1, [4])
gelu_backward: f64[64, 32] = aten.gelu_backward(mm, addmm)
t_6: f64[32, 4] = aten.t(t)
mm_2: f64[64, 4] = aten.mm(gelu_backward, t_6)
t_7: f64[32, 64] = aten.t(gelu_backward)
mm_3: f64[32, 4] = aten.mm(t_7, primals_1)
t_8: f64[4, 32] = aten.t(mm_3)
sum_2: f64[1, 32] = aten.sum(gelu_backward, [0], True)
view_1: f64[32] = aten.view(sum_2, [32])
t_9: f64[32, 4] = aten.t(t_8)
return addmm_1, mm_2, t_9, view_1, t_5, view""",
    )


def test_an_input_that_is_read_for_its_size_alone_becomes_a_constant() -> None:
    """`avg_pool2d_backward` does not read the numbers of `sin`, so `sin` need not be saved."""
    traced = joint_of(lambda x: F.avg_pool2d(x.sin(), 2), grad(1, 1, 4, 4))
    done = check_rewrite(traced, lambda module: replace_shape_only_inputs(module, set()))
    assert done.result.count == 1
    assert_expected_inline(
        done.before,
        """\
sin: f64[1, 1, 4, 4] = aten.sin(primals_1)
avg_pool2d: f64[1, 1, 2, 2] = aten.avg_pool2d(sin, [2, 2])
avg_pool2d_backward: f64[1, 1, 4, 4] = aten.avg_pool2d_backward(tangents_1, sin, [2, 2], [], [0, 0], False, True, None)
cos: f64[1, 1, 4, 4] = aten.cos(primals_1)
mul: f64[1, 1, 4, 4] = aten.mul(avg_pool2d_backward, cos)
return avg_pool2d, mul""",
    )
    assert_expected_inline(
        done.after,
        """\
sin: f64[1, 1, 4, 4] = aten.sin(primals_1)
avg_pool2d: f64[1, 1, 2, 2] = aten.avg_pool2d(sin, [2, 2])
full_default: f64[1, 1, 4, 4] = aten.full([1, 1, 4, 4], 0, dtype=torch.float64, pin_memory=False)
avg_pool2d_backward: f64[1, 1, 4, 4] = aten.avg_pool2d_backward(tangents_1, full_default, [2, 2], [], [0, 0], False, True, None)
cos: f64[1, 1, 4, 4] = aten.cos(primals_1)
mul: f64[1, 1, 4, 4] = aten.mul(avg_pool2d_backward, cos)
return avg_pool2d, mul""",
    )


def test_a_sum_of_two_far_products_is_hidden_from_inductors_addmm() -> None:
    """As ``addmm(mm_2, permute_2, mul_1)``, what mm_2 reads would live until the addition; views of another shape do not match."""

    def tied(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).sin()

    done = check_rewrite(joint_of(tied, grad(8, 8), grad(8, 8)), keep_matmuls_in_place, start="mm_2")
    assert done.result.count == 1
    assert_expected_inline(
        done.before,
        """\
mm_2: f64[8, 8] = aten.mm(permute, mul)
permute_1: f64[8, 8] = aten.permute(primals_2, [1, 0])
mm_3: f64[8, 8] = aten.mm(mul, permute_1)
cos_1: f64[8, 8] = aten.cos(mm)
mul_1: f64[8, 8] = aten.mul(mm_3, cos_1)
permute_2: f64[8, 8] = aten.permute(primals_1, [1, 0])
mm_4: f64[8, 8] = aten.mm(permute_2, mul_1)
permute_3: f64[8, 8] = aten.permute(primals_2, [1, 0])
mm_5: f64[8, 8] = aten.mm(mul_1, permute_3)
add: f64[8, 8] = aten.add(mm_2, mm_4)
return sin_1, mm_5, add""",
    )
    assert_expected_inline(
        done.after,
        """\
mm_2: f64[8, 8] = aten.mm(permute, mul)
permute_1: f64[8, 8] = aten.permute(primals_2, [1, 0])
mm_3: f64[8, 8] = aten.mm(mul, permute_1)
cos_1: f64[8, 8] = aten.cos(mm)
mul_1: f64[8, 8] = aten.mul(mm_3, cos_1)
permute_2: f64[8, 8] = aten.permute(primals_1, [1, 0])
mm_4: f64[8, 8] = aten.mm(permute_2, mul_1)
permute_3: f64[8, 8] = aten.permute(primals_2, [1, 0])
mm_5: f64[8, 8] = aten.mm(mul_1, permute_3)
unsqueeze_default: f64[1, 8, 8] = aten.unsqueeze(mm_2, 0)
unsqueeze_default_1: f64[1, 8, 8] = aten.unsqueeze(mm_4, 0)
add_tensor: f64[1, 8, 8] = aten.add(unsqueeze_default, unsqueeze_default_1)
squeeze_dim: f64[8, 8] = aten.squeeze(add_tensor, 0)
return sin_1, mm_5, squeeze_dim""",
    )
