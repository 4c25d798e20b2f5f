"""A plan's two modules: golden text, invariants, numerics; and torch's own graphs when handed torch's own choice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch._inductor.decomposition import select_decomp_table

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Planner, build_problem, extract, timeline
from compile_remat.passes.problem.problem import POINTWISE
from tests.passes.joint import joint_of
from tests.passes.joint import text as graph_text


def mlp(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (((x @ w1).relu() @ w2).relu() @ w3).sin()


def attention(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    q, k, v = x @ w1, x @ w2, x @ w3
    return torch.softmax(q @ k.transpose(0, 1), -1) @ v + x


def norm(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x @ w1, (x.shape[-1],))
    a, b = (y @ w2).chunk(2, dim=-1)
    return torch.cat([a.sigmoid() * b, torch.nn.functional.gelu(y @ w3)], dim=-1)


def shared(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(x @ w1) * (x @ w1).cos() + x
    return x @ w2 @ w3


FUNCTIONS = (mlp, attention, norm, shared)


def inputs(size: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, size, dtype=torch.float64, requires_grad=True) for _ in range(4)]


def prepared_of(function: Callable[..., Tensor]) -> joint_graph.Joint:
    """The joint graph of a function of `inputs`, prepared for a planner."""
    return joint_graph.prepare(joint_of(function, *inputs()).module, num_fwd_outputs=1)


def gradients(function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> list[Tensor]:
    out = function(*arguments)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), arguments)]


def planned_by(choose: Callable[[Planner], Any]) -> Callable[..., Any]:
    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        prepared = joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs)
        return extract(prepared, choose(Planner(build_problem(prepared, cost=UnitCost()))))

    return partition


def test_golden_of_an_mlp_that_saves_nothing() -> None:
    prepared = prepared_of(mlp)
    forward, backward = extract(
        prepared, Planner(build_problem(prepared, cost=UnitCost())).plan_of(none(prepared), None)
    )
    assert_expected_inline(calls(forward), """mm relu mm relu mm sin -> sin primals_1 primals_2 primals_3 primals_4""")
    assert_expected_inline(
        calls(backward),
        """mm relu mm relu mm cos mul permute mm permute mm alias alias le scalar_tensor where permute mm permute mm alias alias le where permute mm permute mm -> mm mm mm mm""",  # noqa: E501
    )


def test_golden_of_a_step_that_is_written() -> None:
    prepared = prepared_of(mlp)
    plan = replace(Planner(build_problem(prepared, cost=UnitCost())).fastest(), written=("mul", "elsewhere"))
    _, backward = extract(prepared, plan)
    assert_expected_inline(
        calls(backward),
        """mul inductor_force_stride_order permute mm permute mm scalar_tensor where permute mm permute mm where permute mm permute mm -> mm mm mm mm""",  # noqa: E501
    )
    backward.graph.lint()
    (written,) = [n for n in backward.graph.nodes if n.name == "mul"]
    assert written.args[1] == (8, 1) and [n.name for n in written.all_input_nodes] == ["mul__unwritten"]
    assert list(written.args[0].users) == [written]


def test_a_saved_value_is_not_written_again() -> None:
    prepared = prepared_of(mlp)
    plan = Planner(build_problem(prepared, cost=UnitCost())).fastest()
    assert plan.saved
    _, backward = extract(prepared, replace(plan, written=plan.saved))
    assert calls(backward) == calls(extract(prepared, plan)[1])


def none(prepared: joint_graph.Joint) -> Any:
    return np.zeros(len(build_problem(prepared, cost=UnitCost()).values), dtype=bool)


def calls(module: fx.GraphModule) -> str:
    """The operators in order, and what is returned."""
    nodes = list(module.graph.nodes)
    names = [str(n.target).split(".")[1] for n in nodes if n.op == "call_function"]
    returned = [n.name.rstrip("0123456789").rstrip("_") if n.op != "placeholder" else n.name for n in nodes[-1].args[0]]
    return " ".join(names) + " -> " + " ".join(returned)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_invariants(function: Callable[..., Tensor]) -> None:
    prepared = prepared_of(function)
    planner = Planner(build_problem(prepared, cost=UnitCost()))
    for plan in (planner.fastest(), planner.within((planner.fastest().peak_bytes + planner.lowest().peak_bytes) // 2)):
        forward, backward = extract(prepared, plan)
        forward.graph.lint()
        backward.graph.lint()
        assert all("val" in n.meta for m in (forward, backward) for n in m.graph.nodes if n.op == "call_function")
        outputs = list(forward.graph.nodes)[-1].args[0]
        symints_to_save = {n.name for n in outputs[1:] if n.op == "call_function"}
        assert symints_to_save == set(plan.saved)
        names = [n.name for n in backward.graph.nodes]
        assert all(names.count(name) == 1 for name in plan.recomputed)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("choice", ("fastest", "lowest", "half", "torch", "written"))
def test_gradients_equal_eager(function: Callable[..., Tensor], choice: str) -> None:
    def choose(planner: Planner) -> Any:
        if choice == "written":
            return replace(
                planner.lowest(), written=tuple(step.name for step in planner.problem.steps if step.kernel == POINTWISE)
            )
        if choice == "half":
            return planner.within((planner.fastest().peak_bytes + planner.lowest().peak_bytes) // 2)
        return planner.no_worse_than_torch() if choice == "torch" else getattr(planner, choice)()

    compiled = aot_function(
        function, nop, nop, partition_fn=planned_by(choose), decompositions=core_aten_decompositions()
    )
    for ours, eager in zip(gradients(compiled, inputs()), gradients(function, inputs()), strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_random_mask_is_saved_and_the_same_in_the_backward() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x @ w).sin(), 0.5, True)

    x, w = torch.randn(32, 32, requires_grad=True), torch.eye(32, requires_grad=True)
    compiled = aot_function(function, nop, nop, partition_fn=planned_by(lambda p: p.lowest()))
    y = compiled(x, w)
    mask = (y != 0).to(x.dtype)
    (grad,) = torch.autograd.grad(y.sum(), (x,))
    torch.testing.assert_close(grad, (mask * 2 * (x @ w).cos()) @ w.t())


def test_unknown_name_is_an_error() -> None:
    prepared = prepared_of(mlp)
    plan = Planner(build_problem(prepared, cost=UnitCost())).fastest()
    with pytest.raises(ValueError, match="nowhere"):
        extract(prepared, replace(plan, saved=("nowhere",)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_twin_of_torchs_own_partition(function: Callable[..., Tensor]) -> None:
    traced = joint_of(function, *inputs())
    theirs = min_cut_rematerialization_partition(copy.deepcopy(traced.module), traced.inputs, num_fwd_outputs=1)
    prepared = joint_graph.prepare(traced.module, num_fwd_outputs=1)
    ours = joint_graph.extract_modules(prepared, joint_graph.torch_choice(prepared))
    for mine, other in zip(ours, theirs, strict=True):
        assert [text(n) for n in mine.graph.nodes] == [text(n) for n in other.graph.nodes]


def text(node: fx.Node) -> str:
    return f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}"


def double_gelu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gelu = torch.nn.functional.gelu
    return gelu((gelu(x @ w1).t() @ w2) @ w3).t()


def late_masks(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    a = (x @ w1).relu()
    return torch.nn.functional.silu((a @ w2).tanh() @ w3 + a).t()


@pytest.mark.parametrize("function", [*FUNCTIONS, double_gelu, late_masks])
def test_the_backward_runs_in_the_order_of_the_timeline(function: Callable[..., Tensor]) -> None:
    """Parts of a node are left out: the partition puts each right behind its node, and the simulator counts it there."""
    prepared = prepared_of(function)
    problem = build_problem(prepared, cost=UnitCost())
    planner = Planner(problem)
    middle = planner.within((planner.fastest().peak_bytes + planner.lowest().peak_bytes) // 2)
    kernels = {n.name for n in (*problem.values, *problem.steps[:-1]) if n.kernel != "item"}
    for plan in (planner.fastest(), middle, planner.lowest(), planner.plan_of(none(prepared), None)):
        _, backward = extract(prepared, plan)
        predicted = [name for name in timeline(problem, plan).kernels if name in kernels]
        assert predicted == [n.name for n in backward.graph.nodes if n.name in kernels and n.op == "call_function"]


def test_golden_of_dropout_and_a_buffer_that_is_overwritten() -> None:
    """The lowest plan saves `exp` and `add`, which the buffer's old numbers are in, and `gt`, the mask of dropout.

    The backward reads no input.  The buffer's new numbers are written last.
    """

    def function(x: Tensor, buffer: Tensor) -> Tensor:
        y = torch.nn.functional.dropout((x + buffer).sin().exp(), 0.5, True)
        buffer.mul_(2)
        return y

    texts: list[str] = []

    def partition(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        prepared = joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs)
        modules = extract(prepared, Planner(build_problem(prepared, cost=UnitCost())).lowest())
        texts.extend(graph_text(module.graph) for module in modules)
        return modules

    x, buffer = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512)
    before = buffer.clone()
    compiled = aot_function(
        function,
        nop,
        nop,
        partition_fn=partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    y = compiled(x, buffer)
    forward, backward = texts
    assert_expected_inline(
        forward,
        """\
add: f32[512, 512] = aten.add(primals_1, primals_2)
sin: f32[512, 512] = aten.sin(add)
exp: f32[512, 512] = aten.exp(sin)
rand: f32[512, 512] = aten.rand([512, 512], dtype=torch.float32, pin_memory=False)
gt: b8[512, 512] = aten.gt(rand, 0.5)
mul: f32[512, 512] = aten.mul(gt, exp)
mul_1: f32[512, 512] = aten.mul(mul, 2.0)
mul_2: f32[512, 512] = aten.mul(primals_2, 2)
copy_: f32[512, 512] = aten.copy_(primals_2, mul_2)
return mul_1, add, exp, gt""",
    )
    assert_expected_inline(
        backward,
        """\
convert_element_type: f32[512, 512] = prims.convert_element_type(gt, torch.float32)
mul_3: f32[512, 512] = aten.mul(convert_element_type, 2.0)
mul_4: f32[512, 512] = aten.mul(tangents_1, mul_3)
clone: f32[512, 512] = aten.clone(mul_4, memory_format=torch.contiguous_format)
alias: f32[512, 512] = aten.alias(exp)
alias_1: f32[512, 512] = aten.alias(alias)
mul_5: f32[512, 512] = aten.mul(clone, alias_1)
cos: f32[512, 512] = aten.cos(add)
mul_6: f32[512, 512] = aten.mul(mul_5, cos)
return mul_6, None""",
    )
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(buffer, 2 * before)
    inner = x + before
    torch.testing.assert_close(gradient, (y != 0) * 2 * inner.sin().exp() * inner.cos())
