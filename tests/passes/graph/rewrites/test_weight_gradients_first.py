"""Products that give weights' gradients, before those that give inputs': the order, what may not move, the same numbers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import build_problem, timeline
from compile_remat.passes.graph.rewrites.weight_gradients_first import move_weight_gradients_up
from compile_remat.passes.search.solver import Planner


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def look(function: Callable[..., Any], *inputs: Tensor, move: bool = True) -> tuple[joint_graph.Joint, int]:
    """The joint graph of a call after the pass, and how many products it moved."""
    found: list[tuple[joint_graph.Joint, int]] = []

    def partition(module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        joint = joint_graph.prepare(module, num_fwd_outputs=num_fwd_outputs)
        moved = move_weight_gradients_up(joint.module, joint.info.tangents_closure).count if move else 0
        joint.module.graph.lint()
        found.append((joint, moved))
        whole = copy.deepcopy(joint.module)  # torch's partitioner rewrites what it is given
        return joint_graph.torch_partition(whole, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    compiled = aot_function(function, fw_compiler=run, bw_compiler=run, partition_fn=partition)
    expected, actual = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (expected, actual)]
    torch.testing.assert_close(gradients[1], gradients[0])
    (result,) = found
    return result


def backward_of(joint: joint_graph.Joint) -> str:
    """The backward's operators in order, with what they read."""
    nodes = [n for n in joint.module.graph.nodes if n in joint.info.tangents_closure and n.op == "call_function"]
    return "\n".join(f"{n.name} = {n.target}({', '.join(map(str, n.all_input_nodes))})" for n in nodes)


def two_layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.gelu(nn.functional.linear(x, w1, b1)), w2, b2)


def inputs_of(rows: int, width: int, hidden: int) -> tuple[Tensor, ...]:
    return grad(rows, width), grad(hidden, width), grad(hidden), grad(width, hidden), grad(width)


def test_golden_order() -> None:
    joint, moved = look(two_layers, *inputs_of(64, 4, 32))
    assert moved == 1  # the other product reads an input, which nothing frees
    assert_expected_inline(
        backward_of(joint),
        """\
t_3 = aten.t.default(tangents_1)
mm_1 = aten.mm.default(t_3, gelu)
t_4 = aten.t.default(mm_1)
t_5 = aten.t.default(t_4)
mm = aten.mm.default(tangents_1, t_2)
sum_1 = aten.sum.dim_IntList(tangents_1)
view = aten.view.default(sum_1)
gelu_backward = aten.gelu_backward.default(mm, addmm)
mm_2 = aten.mm.default(gelu_backward, t_6)
t_7 = aten.t.default(gelu_backward)
mm_3 = aten.mm.default(t_7, primals_1)
t_8 = aten.t.default(mm_3)
sum_2 = aten.sum.dim_IntList(gelu_backward)
view_1 = aten.view.default(sum_2)
t_9 = aten.t.default(t_8)""",
    )


def test_the_peak_falls_by_what_dies_first() -> None:
    """At 64 rows the hidden tensors (8 KiB each) are most of it: three of them were alive at once, now two."""
    peaks = []
    for move in (False, True):
        joint, _ = look(two_layers, *inputs_of(64, 4, 32), move=move)
        problem = build_problem(joint, cost=UnitCost())
        peaks.append(timeline(problem, Planner(problem).fastest()).peak_bytes)
    assert peaks[1] < peaks[0]


def test_the_peak_never_rises() -> None:
    """Weights of every shape, few rows and many: the peak of the fastest plan never rises."""
    for rows, width in ((2, 64), (64, 64), (256, 8)):
        peaks = []
        for move in (False, True):
            joint, _ = look(two_layers, *inputs_of(rows, width, width), move=move)
            peaks.append(Planner(build_problem(joint, cost=UnitCost())).fastest().peak_bytes)
        assert peaks[1] <= peaks[0], (rows, width)


def test_a_cast_moves_with_its_product() -> None:
    def half(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b.bfloat16(), torch.sin(x).bfloat16(), w.bfloat16()).float()

    joint, moved = look(half, grad(8, 4), grad(4, 4), grad(4))
    names = [n.target for n in joint.module.graph.nodes if n in joint.info.tangents_closure and n.op == "call_function"]
    products = [k for k, target in enumerate(names) if target is torch.ops.aten.mm.default]
    assert moved == 1 and torch.ops.aten._to_copy.default in names[products[0] : products[1]]


def test_tied_weights_are_summed_where_both_gradients_are() -> None:
    def tied(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, torch.addmm(b, torch.sin(x), w).relu(), w)

    joint, moved = look(tied, grad(8, 4), grad(4, 4), grad(4))
    assert moved == 2  # the first product without the sum, which reads both
    assert_expected_inline(
        backward_of(joint),
        """\
mm_1 = aten.mm.default(t_1, tangents_1)
mm = aten.mm.default(tangents_1, t)
sum_1 = aten.sum.dim_IntList(tangents_1)
view = aten.view.default(sum_1)
threshold_backward = aten.threshold_backward.default(mm, detach_1)
mm_3 = aten.mm.default(t_3, threshold_backward)
add_1 = aten.add.Tensor(mm_1, mm_3)
mm_2 = aten.mm.default(threshold_backward, t)
sum_2 = aten.sum.dim_IntList(threshold_backward)
view_1 = aten.view.default(sum_2)
add = aten.add.Tensor(view, view_1)
mul = aten.mul.Tensor(mm_2, cos)""",
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x @ w,  # both products read an input, which nothing frees
        lambda x, w: torch.sin(x) * w.sum(),
    ],
)
def test_what_has_no_pair_stays(function: Callable[..., Any]) -> None:
    inputs = grad(4, 4), grad(4, 4)
    before, _ = look(function, *inputs, move=False)
    after, moved = look(function, *inputs)
    assert moved == 0 and backward_of(after) == backward_of(before)


def test_a_product_that_others_read_stays() -> None:
    """The gradient of `w @ v` is no gradient of a weight yet: two more products read it."""

    def through(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, torch.sin(x), w @ v)

    inputs = grad(8, 4), grad(4, 4), grad(4, 4), grad(4)
    before, _ = look(through, *inputs, move=False)
    after, moved = look(through, *inputs)
    assert moved == 0 and backward_of(after) == backward_of(before)
    direct = look(lambda x, w, v, b: torch.addmm(b, torch.sin(x), w) + v.sum(), *inputs)
    assert direct[1] == 1  # the same product as a weight's gradient moves
