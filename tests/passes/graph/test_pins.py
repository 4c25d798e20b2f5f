"""Pins: what the planner must save is what its fallback saves, and the backward reads no input that was overwritten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from compile_remat import partition
from compile_remat._torch import joint_graph
from compile_remat._torch.version import torch_version
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import UnitCost, load_device
from compile_remat.partitioning.joint_split import split_without_planner
from compile_remat.passes import build_problem
from compile_remat.passes.graph.pins import must_be_saved
from compile_remat.passes.problem.problem import SAVE
from compile_remat.planning.settings import Settings

SETTINGS = Settings(MemoryBudget("max"), load_device("cpu"))


def draws_and_mutates(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    rows = buffer.view(64).view(8, 8).t()[1]
    y = torch.nn.functional.dropout(torch.sin(x @ w) * rows.exp(), 0.3, True) * torch.rand_like(x)
    y = torch.sin(y * torch.stack(buffer.unbind(0)[2:4]).cos().sum(0))
    buffer.mul_(0.5)
    return torch.sin(y @ w) * buffer.exp()


def copies_by_hand(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    """Each copy is an operation without effect, but for the mutation below."""
    copy = buffer.clone()
    y = torch.sin(
        (x @ w) * copy * buffer[1:2].clone() * buffer.t().clone() @ copy.t()
    )  # the backward turns the copy back
    buffer.mul_(0.5)
    return y


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, w, torch.randn(8, 8, dtype=torch.float64)


def run(function: Callable[..., Tensor], partition_fn: Callable[..., Any]) -> list[Tensor]:
    """Output, gradients and the buffer afterwards."""

    def compiler(graph: fx.GraphModule, arguments: Any) -> Any:
        return make_boxed_func(graph.forward)

    x, w, buffer = inputs()
    traced = aot_function(function, compiler, compiler, partition_fn=partition_fn, keep_inference_input_mutations=True)
    output = traced(x, w, buffer)
    output.sum().backward()
    assert x.grad is not None and w.grad is not None
    return [output.detach(), x.grad, w.grad, buffer]


@pytest.mark.parametrize("function", [draws_and_mutates, copies_by_hand])
def test_the_fallback_saves_what_the_planner_must_save(function: Callable[..., Tensor]) -> None:
    def spy(module: fx.GraphModule, arguments: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        joint = joint_graph.prepare(module, num_fwd_outputs=num_fwd_outputs, **keywords)
        problem = build_problem(joint, cost=UnitCost())
        pinned = {v.name for v in problem.values if v.pin == SAVE and v.is_saveable}
        assert pinned == {node.name for node in must_be_saved(joint)} != set()
        read = {problem.values[i].name for step in problem.steps for i in step.reads}
        forward, backward = split_without_planner(module, arguments, SETTINGS, "test", num_fwd_outputs=num_fwd_outputs)
        computed = {node.name for node in backward.graph.nodes if node.op == "call_function"}
        assert pinned & read and not pinned & computed
        return forward, backward

    run(function, spy)


def without_operations_of_no_effect(
    module: fx.GraphModule, arguments: Any, *, memory_budget: object, **keywords: Any
) -> Any:
    """Our partition behind the joint pass with which Inductor removes copies; torch 2.15 spares those that matter."""
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    before = len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))
    remove_noop_ops(module.graph)
    removed = before - len(module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))
    assert removed or torch_version() > (2, 13)
    forward, backward = partition(module, arguments, memory_budget=memory_budget, **keywords)
    assert "aten.copy_.default" in {str(node.target) for node in forward.graph.nodes}
    return forward, backward


@pytest.mark.parametrize("budget", ["max", "min"])
def test_the_backward_reads_old_values_of_overwritten_inputs(budget: object) -> None:
    x, w, buffer = inputs()
    output = copies_by_hand(x, w, buffer)
    output.sum().backward()
    actual = run(copies_by_hand, functools.partial(without_operations_of_no_effect, memory_budget=budget))
    torch.testing.assert_close(actual, [output.detach(), x.grad, w.grad, buffer])


def test_a_graph_that_overwrites_nothing_is_left_alone() -> None:
    def spy(module: fx.GraphModule, arguments: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        module.graph.eliminate_dead_code()
        names = [node.name for node in module.graph.nodes]
        assert [
            node.name for node in joint_graph.prepare(module, num_fwd_outputs=num_fwd_outputs).module.graph.nodes
        ] == names
        return partition(module, arguments, num_fwd_outputs=num_fwd_outputs)

    run(lambda x, w, buffer: torch.sin(x @ w) * buffer, spy)


def test_golden_of_every_reason_to_pin() -> None:
    """`rand_like` is drawn, `add` reads a buffer that `copy_` overwrites, `sin` is in a checkpoint; others are free."""

    def function(x: Tensor, buffer: Tensor) -> Tensor:
        y = x.exp() * (torch.rand_like(x) < 0.5)
        y = y.cos() + buffer
        buffer.zero_()
        return checkpoint(lambda z: z.sin().cos(), y, use_reentrant=False)

    found: list[str] = []

    def partition_fn(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        problem = build_problem(joint, num_fwd_outputs=num_fwd_outputs, cost=UnitCost())
        found.append("\n".join(f"{v.name}: {v.pin} {v.tag}".rstrip() for v in problem.values))
        return partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs)

    def run_forward(module: fx.GraphModule, inputs: Any) -> Any:
        return module.forward

    backend = aot_autograd(
        fw_compiler=run_forward, bw_compiler=run_forward, partition_fn=partition_fn, keep_inference_input_mutations=True
    )
    torch.compiler.reset()
    torch.compile(function, backend=backend)(torch.randn(8, requires_grad=True), torch.ones(8))
    assert_expected_inline(
        found[0],
        """\
exp: free
rand_like: save
lt: free
mul: free
cos: free
add: save
zero: save
sin: recompute prefer_recompute
cos_1: recompute prefer_recompute
sin_1: free
neg: free
cos_2: free
sin_2: free
neg_1: free
copy_: save""",
    )
