"""Poolings' backwards, which read their second argument for its size: the constant in its place, what stays, the same numbers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Planner, build_problem
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context
from compile_remat.passes.graph.rewrites.shape_only_inputs import replace_shape_only_inputs

aten = torch.ops.aten


def look(function: Callable[..., Any], *inputs: Tensor) -> tuple[joint_graph.Joint, int]:
    """The prepared joint graph of a call, whose gradients are checked, and how many inputs were replaced."""
    found: list[tuple[joint_graph.Joint, int]] = []

    def partition(module: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        other = copy.deepcopy(module)
        constants = set[fx.Node]()
        replaced = replace_shape_only_inputs(module, constants).count
        assert len(constants) == replaced
        module.graph.lint()
        whole = copy.deepcopy(module)
        assert not replace_shape_only_inputs(module, constants).count  # nothing is left for a second time
        joint = as_in_torch(other, num_fwd_outputs=num_fwd_outputs)
        found.append((apply_to_joint(joint, Context(splits_convolutions=True)).joint, replaced))
        return joint_graph.torch_partition(whole, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def run(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    compiled = aot_function(function, fw_compiler=run, bw_compiler=run, partition_fn=partition)
    expected, actual = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (expected, actual)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    (result,) = found
    return result


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_golden_text() -> None:
    joint, replaced = look(lambda x: F.max_pool2d(F.avg_pool2d(torch.sin(x), 2), 3, 2, 1), image(2, 3, 16, 16))
    assert replaced == 2
    nodes = [n for n in joint.module.graph.nodes if n.op == "call_function"]
    assert_expected_inline(
        "\n".join(f"{n.name} = {n.target}({', '.join(map(str, n.all_input_nodes))})" for n in nodes),
        """\
sin = aten.sin.default(primals_1)
avg_pool2d = aten.avg_pool2d.default(sin)
max_pool2d_with_indices = aten.max_pool2d_with_indices.default(avg_pool2d)
getitem = <built-in function getitem>(max_pool2d_with_indices)
getitem_1 = <built-in function getitem>(max_pool2d_with_indices)
full_default = aten.full.default()
max_pool2d_with_indices_backward = aten.max_pool2d_with_indices_backward.default(tangents_1, full_default, getitem_1)
full_default_1 = aten.full.default()
avg_pool2d_backward = aten.avg_pool2d_backward.default(max_pool2d_with_indices_backward, full_default_1)
cos = aten.cos.default(primals_1)
mul = aten.mul.Tensor(avg_pool2d_backward, cos)""",
    )


def test_what_is_pooled_need_not_be_saved() -> None:
    """Of sixteen pooled numbers one is left; the indices of the largest are all that the backward needs."""

    def pool(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(x * w.exp(), 4)

    joint, replaced = look(pool, image(2, 3, 16, 16), image(1))
    assert replaced == 1
    problem = build_problem(joint, cost=UnitCost())
    readers = {problem.values[v].name for step in problem.steps for v in step.reads}
    assert "mul" not in readers and any("getitem" in name for name in readers)
    assert "mul" not in Planner(problem).fastest().saved


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.max_pool2d(torch.sin(x), 3, 2, 1, dilation=2),  # ATen's kernel
        lambda x: F.avg_pool2d(
            torch.sin(x), 8, 1
        ),  # 64 windows over each number: ATen's kernel, which would be given it
        lambda x: F.adaptive_avg_pool2d(torch.sin(x), 2),
    ],
)
def test_others_keep_their_input(function: Callable[..., Any]) -> None:
    assert look(function, image(2, 3, 16, 16))[1] == 0


def test_symbolic_sizes_stay() -> None:
    found: list[int] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
            found.append(replace_shape_only_inputs(joint, set()).count)
            return joint_graph.torch_partition(joint, joint_inputs, **keywords)

        def run(graph: fx.GraphModule, inputs: Any) -> Any:
            return make_boxed_func(graph.forward)

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)(module, inputs)

    torch.compile(lambda x: F.avg_pool2d(torch.sin(x), 2), backend=backend, dynamic=True)(
        image(2, 3, 16, 16)
    ).sum().backward()
    assert found == [0]
