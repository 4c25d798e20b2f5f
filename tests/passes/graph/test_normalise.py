"""A joint graph before and after torch's own clean-up and our rewrites."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from functorch.compile import default_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context
from tests.passes.joint import check_rewrite, joint_of, text


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rewritten(module: fx.GraphModule) -> joint_graph.Joint:
    return apply_to_joint(as_in_torch(module, num_fwd_outputs=1), Context(splits_convolutions=True)).joint


def test_equal_nodes_become_one_and_dead_ones_go() -> None:
    """`mm_1` is `mm` again, so `cos_1` is `cos` and `sin_1` is `sin`; nothing reads `exp`."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        (x @ w).exp()
        return (x @ w).sin() * (x @ w).cos()

    graphs: list[fx.Graph] = []

    def rewrite(module: fx.GraphModule) -> None:
        graphs.append(rewritten(module).module.graph)

    done = check_rewrite(joint_of(function, grad(8, 8), grad(8, 8)), rewrite)
    assert_expected_inline(
        done.changes,
        """\
- mm_2: f64[8, 8] = aten.mm(primals_1, primals_2)
- cos: f64[8, 8] = aten.cos(mm_2)
+ cos: f64[8, 8] = aten.cos(mm_1)
- sin_1: f64[8, 8] = aten.sin(mm_2)
- neg: f64[8, 8] = aten.neg(sin_1)
+ neg: f64[8, 8] = aten.neg(sin)
- cos_1: f64[8, 8] = aten.cos(mm_1)
- mul_4: f64[8, 8] = aten.mul(mul_2, cos_1)
+ mul_4: f64[8, 8] = aten.mul(mul_2, cos)
- permute_2: f64[8, 8] = aten.permute(primals_1, [1, 0])
- mm_5: f64[8, 8] = aten.mm(permute_2, mul_4)
+ mm_5: f64[8, 8] = aten.mm(permute, mul_4)
- permute_3: f64[8, 8] = aten.permute(primals_2, [1, 0])
- mm_6: f64[8, 8] = aten.mm(mul_4, permute_3)
+ mm_6: f64[8, 8] = aten.mm(mul_4, permute_1)""",
    )
    assert text(graphs[0]) == done.after  # it is rewritten in place


def test_two_draws_are_not_one() -> None:
    """CSE must not join operators that draw random numbers, although their text is equal."""
    module = joint_of(lambda x: x * torch.rand_like(x) * torch.rand_like(x), grad(4)).module
    graph = rewritten(module).module.graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default)) == 2


def test_a_graph_that_is_traced_again_has_the_same_names() -> None:
    """The second trace finds comparisons of sizes already settled: torch counts others, which nothing reads."""
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        again = copy.deepcopy(joint)
        for place, node in enumerate(again.graph.nodes, start=len(again.graph.nodes)):
            if node.op == "call_function":
                node.name = f"{re.sub(r'_[0-9]+$', '', node.name)}_{place}"
        found.extend((joint, again))
        for module in found:
            as_in_torch(module, num_fwd_outputs=num_fwd_outputs, **keywords)
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    backend = aot_autograd(fw_compiler=forward_of, bw_compiler=forward_of, partition_fn=partition)
    torch.compiler.reset()
    torch.compile(lambda x: x.sin().cumprod(0).sin(), backend=backend, dynamic=True)(grad(6, 3)).sum().backward()
    first, second = ([n.name for n in module.graph.nodes] for module in found)
    assert len(first) > 20 and first == second
    assert [n for n in first if n.startswith("sin")] == ["sin", "sin_1"]
    assert [n for n in first if n.startswith("primals")] == [f"primals_{k + 1}" for k in range(3)]


def forward_of(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return module.forward
