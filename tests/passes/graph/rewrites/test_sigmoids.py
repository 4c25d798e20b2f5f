"""A denominator that two read: the one whose quotient is a sigmoid reads it no more, what stays, the same numbers."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.rewrites.sigmoids import separate_sigmoids
from tests.passes.joint import BeforeAfter, check_rewrite, joint_of


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rewritten(function: Callable[..., Tensor], *inputs: Tensor) -> BeforeAfter:
    def rewrite(module: fx.GraphModule) -> Rewritten:
        return separate_sigmoids(joint_graph.prepare(module, num_fwd_outputs=1).module)

    return check_rewrite(joint_of(function, *inputs, decompositions={}), rewrite)


def denominator(x: Tensor) -> Tensor:
    return 1 + x.neg().exp()


def test_golden_graph() -> None:
    done = rewritten(lambda x: x / denominator(x) + denominator(x).reciprocal(), grad(8))
    assert done.result.count == 1
    assert_expected_inline(
        done.after,
        """\
neg: f64[8] = aten.neg(primals_1)
exp: f64[8] = aten.exp(neg)
detach: f64[8] = aten.detach(exp)
add: f64[8] = aten.add(exp, 1)
div: f64[8] = aten.div(primals_1, add)
reciprocal: f64[8] = aten.sigmoid(primals_1)
detach_2: f64[8] = aten.detach(reciprocal)
add_2: f64[8] = aten.add(div, reciprocal)
detach_3: f64[8] = aten.detach(detach_2)
mul: f64[8] = aten.mul(detach_3, detach_3)
neg_2: f64[8] = aten.neg(tangents_1)
mul_1: f64[8] = aten.mul(neg_2, mul)
detach_4: f64[8] = aten.detach(detach)
mul_2: f64[8] = aten.mul(mul_1, detach_4)
neg_3: f64[8] = aten.neg(mul_2)
div_2: f64[8] = aten.div(div, add)
mul_3: f64[8] = aten.mul(neg_2, div_2)
div_3: f64[8] = aten.div(tangents_1, add)
add_3: f64[8] = aten.add(neg_3, div_3)
mul_4: f64[8] = aten.mul(mul_3, detach_4)
neg_5: f64[8] = aten.neg(mul_4)
add_4: f64[8] = aten.add(add_3, neg_5)
return add_2, add_4""",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: denominator(x).reciprocal(),
        lambda x: x / (2 + x.neg().exp()) + (2 + x.neg().exp()).reciprocal(),
        lambda x: x / (1 + x.exp()) + (1 + x.exp()).reciprocal(),
    ],
    ids=["one reader", "another number", "another sign"],
)
def test_what_stays(function: Callable[[Tensor], Tensor]) -> None:
    assert rewritten(function, grad(8)).result.count == 0


def test_integers_stay() -> None:
    def scaled(x: Tensor, n: Tensor) -> Tensor:
        return x * (n / denominator(n) + denominator(n).reciprocal())

    assert rewritten(scaled, grad(8), torch.arange(8)).result.count == 0
