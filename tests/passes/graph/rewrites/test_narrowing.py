"""Narrow forms of values: what the graph looks like with them, which values have one, and the graph without them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Planner, as_in_torch, build_problem, extract, keep_narrow, may_narrow, narrow_values
from compile_remat.passes.graph.rewrites.narrowing import NarrowForm, narrowable_bytes
from compile_remat.passes.graph.rewrites.static_ranges import narrow_type, num_indices
from tests.passes.joint import Traced, check_rewrite, joint_of, text

aten = torch.ops.aten


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def masked(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sin(), x * 2)


def prepared(traced: Traced) -> joint_graph.Joint:
    return as_in_torch(traced.module, num_fwd_outputs=traced.num_fwd_outputs)


def narrowed(function: Callable[..., Any], *arguments: Any) -> tuple[joint_graph.Joint, tuple[NarrowForm, ...]]:
    return narrow_values(prepared(joint_of(function, *arguments)))


def test_readers_of_a_bool_read_its_bits() -> None:
    traced = joint_of(masked, grad(64, 65))

    def rewrite(module: fx.GraphModule) -> list[tuple[str, int, int]]:
        joint, forms = narrow_values(as_in_torch(module, num_fwd_outputs=1))
        assert joint.module is module
        return [(form.value.name, form.nbytes, form.narrow_bytes) for form in forms]

    done = check_rewrite(traced, rewrite)
    assert done.result == [("gt", 4160, 576)]
    assert_expected_inline(
        done.after,
        """\
gt: b8[64, 65] = aten.gt(primals_1, 0)
gt_narrow: torch.uint8[576] = compile_remat.pack_bits(gt, [0, 1])
gt_wide: b8[64, 65] = compile_remat.unpack_bits(gt_narrow, [64, 65], [0, 1])
sin: f32[64, 65] = aten.sin(primals_1)
mul: f32[64, 65] = aten.mul(primals_1, 2)
where: f32[64, 65] = aten.where(gt_wide, sin, mul)
scalar_tensor: f32[] = aten.scalar_tensor(0, dtype=torch.float32)
where_1: f32[64, 65] = aten.where(gt_wide, scalar_tensor, tangents_1)
where_2: f32[64, 65] = aten.where(gt_wide, tangents_1, scalar_tensor)
mul_1: f32[64, 65] = aten.mul(where_1, 2)
cos: f32[64, 65] = aten.cos(primals_1)
mul_2: f32[64, 65] = aten.mul(where_2, cos)
add: f32[64, 65] = aten.add(mul_1, mul_2)
return where, add""",
    )


def test_readers_of_an_index_read_it_in_the_smallest_type() -> None:
    def longest(x: Tensor) -> Tensor:
        return x.max(1).values

    traced = joint_of(longest, grad(64, 300, 16))

    def rewrite(module: fx.GraphModule) -> int:
        return len(narrow_values(as_in_torch(module, num_fwd_outputs=1))[1])

    done = check_rewrite(traced, rewrite)
    assert done.result == 1
    assert_expected_inline(
        done.after,
        """\
max_1 = aten.max(primals_1, 1)
getitem: f32[64, 16] = getitem(max_1, 0)
getitem_1: i64[64, 16] = getitem(max_1, 1)
getitem_1_narrow: torch.int16[64, 16] = prims.convert_element_type(getitem_1, torch.int16)
getitem_1_wide: i64[64, 16] = prims.convert_element_type(getitem_1_narrow, torch.int64)
unsqueeze: f32[64, 1, 16] = aten.unsqueeze(tangents_1, 1)
unsqueeze_1: i64[64, 1, 16] = aten.unsqueeze(getitem_1_wide, 1)
full: f32[64, 300, 16] = aten.full([64, 300, 16], 0, dtype=torch.float32, pin_memory=False)
scatter: f32[64, 300, 16] = aten.scatter(full, 1, unsqueeze_1, unsqueeze)
return getitem, scatter""",
    )


def test_forms_that_no_plan_saves_leave_the_graph_as_it_was() -> None:
    traced = joint_of(lambda x: masked(masked(x)), grad(64, 65))
    joint = prepared(traced)
    before = text(joint.module.graph)
    joint, forms = narrow_values(joint)
    assert len(forms) == 2
    joint, kept, dropped = keep_narrow(joint, forms, {forms[1].narrow.name})
    assert kept == forms[1:]
    assert dropped == {"gt_narrow": "gt", "gt_wide": "gt"}
    joint, kept, _ = keep_narrow(joint, kept, ())
    assert not kept and text(joint.module.graph) == before


def test_the_forward_makes_the_form_and_the_backward_reads_it() -> None:
    traced = joint_of(lambda x: masked(x) @ x, grad(65, 65))
    joint, forms = narrow_values(prepared(traced))
    assert joint.info.is_required_fw(forms[0].narrow) and joint.info.is_required_fw(forms[0].wide)
    problem = build_problem(joint, cost=UnitCost())
    planner = Planner(problem)
    plan = planner.plan_of(planner.mask_of([forms[0].narrow.name]), None)
    assert plan.saved == ("gt_narrow",) and plan.saved_bytes == num_saved(problem, "gt_narrow")
    forward, backward = extract(joint, plan)
    outputs = forward(traced.inputs[0])
    assert any(value.dtype is torch.uint8 and value.numel() == plan.saved_bytes for value in outputs)
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    assert given["gt_narrow"].meta["val"].dtype is torch.uint8
    by_name = {name: value for name, value in zip(outputs_of(forward), outputs, strict=True)}
    values = [
        traced.inputs[-1] if name.startswith("tangents") else by_name.get(name, traced.inputs[0]) for name in given
    ]
    torch.testing.assert_close(backward(*values)[0], traced.expected[1])


def num_saved(problem: Any, name: str) -> int:
    return next(value.nbytes for value in problem.values if value.name == name)


def outputs_of(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.output_node().args[0]]


def max_index(x: Tensor) -> Tensor:
    return x * x.argmax(1, keepdim=True)


@pytest.mark.parametrize(
    ("function", "shape", "count"),
    [
        (lambda x: x.max(1).values, (9, 40, 5), 40),
        (lambda x: x.sort(-1).values, (9, 40, 5), 5),
        (lambda x: x.topk(3, 1).values, (9, 40, 5), 40),
        (lambda x: x.cummax(0).values, (9, 40, 5), 9),
        (lambda x: x.median(1).values, (9, 40), 40),
        (lambda x: aten.max_pool2d_with_indices(x, [2, 2])[0], (2, 3, 8, 6), 48),
        (max_index, (9, 40), 40),
    ],
)
def test_ranges_of_indices(function: Any, shape: tuple[int, ...], count: int) -> None:
    traced = joint_of(function, grad(*shape), decompositions={})
    found = {num_indices(node) for node in traced.module.graph.nodes if node.op == "call_function"}
    assert found - {None} == {count}


def test_the_smallest_type_for_a_range() -> None:
    counts = [1, 256, 257, 1 << 15, (1 << 15) + 1, 1 << 31, (1 << 31) + 1]
    types = [torch.uint8, torch.uint8, torch.int16, torch.int16, torch.int32, torch.int32, None]
    assert [narrow_type(count) for count in counts] == types


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: (lambda m: (m, torch.where(m, x, x * 2)))(x > 0), (64, 65)),  # an output
        (masked, (16, 16)),  # less than a page
        (lambda x: torch.where(torch.ones(64, 65).tril().bool(), x, x * 2), (64, 65)),  # of nothing that is computed
        (lambda x: x.sin().exp(), (64, 65)),
    ],
)
def test_values_without_a_narrow_form(function: Any, shape: tuple[int, ...]) -> None:
    joint, forms = narrowed(function, grad(*shape))
    assert not forms and not narrowable_bytes(joint)


def test_inputs_have_no_narrow_form() -> None:
    mask = torch.ones(64, 65, dtype=torch.bool)
    traced = joint_of(lambda x, m: torch.where(m, x, x * 2), grad(64, 65), mask)
    assert not may_narrow(traced.module)


def test_what_is_computed_of_less_than_its_form_has_none() -> None:
    """To compare the targets of a loss with all words costs less than to read that in bits."""

    def of_targets(x: Tensor, targets: Tensor) -> Tensor:
        return torch.where(torch.arange(300) == targets.unsqueeze(1), x.exp(), x.sin())

    def of_numbers(x: Tensor, numbers: Tensor) -> Tensor:
        return torch.where(numbers == 3, x.exp(), x.sin())

    def drawn(x: Tensor) -> Tensor:
        return torch.where(torch.rand(64, 300) > 0.1, x.exp(), x.sin())

    x = grad(64, 300)
    assert narrowed(of_targets, x, torch.zeros(64, dtype=torch.int64))[1] == ()
    assert len(narrowed(of_numbers, x, torch.zeros(64, 300, dtype=torch.int64))[1]) == 1
    assert len(narrowed(drawn, x)[1]) == 1


def test_a_tag_of_the_user_comes_first() -> None:
    traced = joint_of(masked, grad(64, 65))
    (compared,) = traced.module.graph.find_nodes(op="call_function", target=aten.gt.Scalar)
    compared.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    assert not narrow_values(prepared(traced))[1]


def test_channels_of_convolutions_are_innermost() -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.where(torch.conv2d(x, w) > 0, 1.0, x)

    _, forms = narrowed(layer, grad(4, 16, 8, 8), grad(16, 16, 1, 1))
    found = [form.narrow.args[1] for form in forms]
    assert found in ([[0, 2, 3, 1]], [])  # the gradient of x alone may need no mask
