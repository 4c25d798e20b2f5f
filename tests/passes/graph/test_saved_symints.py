"""The symbolic sizes that the forward hands to the backward, on a small graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context
from compile_remat.passes.graph.saved_symints import symints_to_save
from tests.passes.joint import lines_with


def test_golden_of_a_sum_over_a_dynamic_size() -> None:
    """The backward expands to the size of `x`, which the forward knows: it hands the number over, not the tensor."""
    found: list[joint_graph.Joint] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        prepared = as_in_torch(joint, num_fwd_outputs=num_fwd_outputs, **keywords)
        found.append(apply_to_joint(prepared, Context(splits_convolutions=True)).joint)
        return joint_graph.extract_modules(found[0], joint_graph.torch_choice(found[0]))

    def run(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return module.forward

    def function(x: Tensor) -> Tensor:
        return torch.cat([x, x.sin()]).sum()

    backend = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition)
    torch.compiler.reset()
    torch.compile(function, backend=backend, dynamic=True)(torch.randn(6, 3, requires_grad=True))
    assert_expected_inline(
        lines_with(found[0].module.graph, "sym_size_int", "add"),
        """\
sym_size_int = aten.sym_size(cat, 0)
expand: f32[2*s77, s27] = aten.expand(tangents_1, [sym_size_int, primals_2])
add = add(primals_1, primals_1)
slice_2: f32[s77, s27] = aten.slice(expand, 0, primals_1, add)
add_1: f32[s77, s27] = aten.add(slice_1, mul)
return sum_1, None, None, add_1""",
    )
    assert_expected_inline(" ".join(node.name for node in symints_to_save(found[0])), """sym_size_int add""")
