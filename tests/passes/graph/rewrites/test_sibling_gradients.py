"""Two gradients of one gradient, made side by side: the order, what may not move, the same numbers, the peak."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.nn import functional as F

import compile_remat
from compile_remat._torch import joint_graph
from compile_remat.backend import remat
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.rewrites.sibling_gradients import make_sibling_gradients_together
from tests.passes.joint import BeforeAfter, check_rewrite, joint_of


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rewritten(function: Callable[..., Any], *inputs: Tensor, start: str = "") -> BeforeAfter:
    """Returns the pass's rewrite of a function's joint graph; `check_rewrite` compares the numbers."""

    def rewrite(module: fx.GraphModule) -> Rewritten:
        joint = joint_graph.prepare(module, num_fwd_outputs=1)
        return make_sibling_gradients_together(joint.module, joint.info.tangents_closure)

    return check_rewrite(joint_of(function, *inputs, decompositions={}), rewrite, start=start)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (torch.tanh(x @ gate) * (x @ up)) @ down


INPUTS = grad(64, 4), grad(4, 16), grad(4, 16), grad(16, 4)


def test_golden_order() -> None:
    """Before, `mm_4`, `tanh` and `mm_1` were alive beside `mul_1` while mm_5 and mm_6 ran; now `tanh_backward` and `mul_1`."""
    done = rewritten(gated, *INPUTS, start="mm_2")
    assert done.result.count == 1
    assert_expected_inline(
        done.before,
        """\
mm_2: f64[64, 4] = aten.mm(mul, primals_4)
t: f64[16, 64] = aten.t(mul)
mm_3: f64[16, 4] = aten.mm(t, tangents_1)
t_1: f64[4, 16] = aten.t(primals_4)
mm_4: f64[64, 16] = aten.mm(tangents_1, t_1)
mul_1: f64[64, 16] = aten.mul(mm_4, tanh)
mul_2: f64[64, 16] = aten.mul(mm_4, mm_1)
t_2: f64[4, 64] = aten.t(primals_1)
mm_5: f64[4, 16] = aten.mm(t_2, mul_1)
t_3: f64[16, 4] = aten.t(primals_3)
mm_6: f64[64, 4] = aten.mm(mul_1, t_3)
detach_1: f64[64, 16] = aten.detach(detach)
tanh_backward: f64[64, 16] = aten.tanh_backward(mul_2, detach_1)
t_4: f64[4, 64] = aten.t(primals_1)
mm_7: f64[4, 16] = aten.mm(t_4, tanh_backward)
t_5: f64[16, 4] = aten.t(primals_2)
mm_8: f64[64, 4] = aten.mm(tanh_backward, t_5)
add: f64[64, 4] = aten.add(mm_6, mm_8)
return mm_2, add, mm_7, mm_5, mm_3""",
    )
    assert_expected_inline(
        done.after,
        """\
mm_2: f64[64, 4] = aten.mm(mul, primals_4)
t: f64[16, 64] = aten.t(mul)
mm_3: f64[16, 4] = aten.mm(t, tangents_1)
t_1: f64[4, 16] = aten.t(primals_4)
mm_4: f64[64, 16] = aten.mm(tangents_1, t_1)
mul_2: f64[64, 16] = aten.mul(mm_4, mm_1)
detach_1: f64[64, 16] = aten.detach(detach)
tanh_backward: f64[64, 16] = aten.tanh_backward(mul_2, detach_1)
mul_1: f64[64, 16] = aten.mul(mm_4, tanh)
t_2: f64[4, 64] = aten.t(primals_1)
mm_5: f64[4, 16] = aten.mm(t_2, mul_1)
t_3: f64[16, 4] = aten.t(primals_3)
mm_6: f64[64, 4] = aten.mm(mul_1, t_3)
mm_7: f64[4, 16] = aten.mm(t_2, tanh_backward)
t_5: f64[16, 4] = aten.t(primals_2)
mm_8: f64[64, 4] = aten.mm(tanh_backward, t_5)
add: f64[64, 4] = aten.add(mm_6, mm_8)
return mm_2, add, mm_7, mm_5, mm_3""",
    )


def of_a_tangent(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The caller holds the gradient of an output."""
    return torch.tanh(x @ gate) * (x @ up)


def larger(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The moved value would be larger than the gradient that dies, which is a column."""
    return (torch.tanh(x @ gate).sum(1, keepdim=True) * (x @ up).sum(1, keepdim=True)).expand(64, 16) @ down


@pytest.mark.parametrize("function", [of_a_tangent, larger])
def test_what_would_free_nothing_stays(function: Callable[..., Tensor]) -> None:
    assert rewritten(function, *INPUTS).result.count == 0


def test_of_three_the_last_one_moves_beside_the_second_one() -> None:
    """The first one's products still need the gradient that they come from beside them, for the second and the third."""

    def three(x: Tensor, a: Tensor, b: Tensor, c: Tensor, down: Tensor) -> Tensor:
        return (torch.tanh(x @ a) + torch.sin(x @ b) + torch.cos(x @ c)) @ down

    done = rewritten(three, grad(64, 4), *(grad(4, 16) for _ in range(3)), grad(16, 4), start="mm_3")
    assert done.result.count == 1
    assert_expected_inline(
        done.after,
        """\
mm_3: f64[64, 4] = aten.mm(add_1, primals_5)
t: f64[16, 64] = aten.t(add_1)
mm_4: f64[16, 4] = aten.mm(t, tangents_1)
t_1: f64[4, 16] = aten.t(primals_5)
mm_5: f64[64, 16] = aten.mm(tangents_1, t_1)
sin_1: f64[64, 16] = aten.sin(mm_2)
neg: f64[64, 16] = aten.neg(sin_1)
mul: f64[64, 16] = aten.mul(mm_5, neg)
t_2: f64[4, 64] = aten.t(primals_1)
mm_6: f64[4, 16] = aten.mm(t_2, mul)
t_3: f64[16, 4] = aten.t(primals_4)
mm_7: f64[64, 4] = aten.mm(mul, t_3)
cos_1: f64[64, 16] = aten.cos(mm_1)
detach_1: f64[64, 16] = aten.detach(detach)
tanh_backward: f64[64, 16] = aten.tanh_backward(mm_5, detach_1)
mul_1: f64[64, 16] = aten.mul(mm_5, cos_1)
mm_8: f64[4, 16] = aten.mm(t_2, mul_1)
t_5: f64[16, 4] = aten.t(primals_3)
mm_9: f64[64, 4] = aten.mm(mul_1, t_5)
add_2: f64[64, 4] = aten.add(mm_7, mm_9)
mm_10: f64[4, 16] = aten.mm(t_2, tanh_backward)
t_7: f64[16, 4] = aten.t(primals_2)
mm_11: f64[64, 4] = aten.mm(tanh_backward, t_7)
add_3: f64[64, 4] = aten.add(add_2, mm_11)
return mm_3, add_3, mm_10, mm_8, mm_6, mm_4""",
    )


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((32, 256), (32, 256), (256, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.usefixtures("empty_kernels")
def test_the_lowest_peak_of_a_gated_block_is_that_of_the_code() -> None:
    """Four tensors of the hidden size, with the weights' gradients; in autograd's order more."""
    x = torch.randn(1024, 32)
    torch.compile(nn.Sequential(Gated(), Gated()), backend=remat, options={"memory_budget": "min"})(x).sum().backward()
    (report,) = compile_remat.reports()
    hidden_bytes = 1024 * 256 * 4
    assert report.scheduled_peak_bytes == report.predicted_peak_bytes
    assert 4 * hidden_bytes <= report.scheduled_peak_bytes < 4.5 * hidden_bytes
