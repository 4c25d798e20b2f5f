"""Snapshots of inputs: golden text of both graphs, invariants, and numbers where inputs change before the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compile_remat._torch import joint_graph
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Plan, Planner, Problem, build_problem, extract, timeline
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.snapshots import add_snapshots, readable_inputs, unreadable_inputs
from compile_remat.passes.problem.constant_inputs import without_snapshots
from tests.passes.joint import Traced, joint_of, lines_with, text

ROWS, WIDTH = 64, 8


def tensor(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64).requires_grad_(grad)


def layers(x: Tensor, weight: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    return F.gelu(F.gelu(F.linear(x, weight, bias)) @ second)


def part_of_a_bank(x: Tensor, bank: Tensor, weight: Tensor) -> Tensor:
    return F.gelu((x @ weight).exp() @ bank[:WIDTH].exp().t())


def three_in_one(x: Tensor, packed: Tensor) -> Tensor:
    """Frozen matrices in one tensor; nothing before them needs a gradient but x."""
    q, k, v = packed.chunk(3)
    return ((x + q.sum(0)).sin() * (x + k.sum(0)).cos()).exp() * v.sum(0)


def words(table: Tensor, weight: Tensor, indices: Tensor) -> Tensor:
    return F.gelu(F.gelu(F.embedding(indices, table)) @ weight) @ weight


def by_strides(x: Tensor, whole: Tensor) -> Tensor:
    part = whole.as_strided((ROWS, WIDTH), (WIDTH, 1), WIDTH).sum(0)
    return ((x + part).sin() * part.cos()).exp()


def frozen_norm(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor) -> Tensor:
    h = (x - mean) / (var + 1e-5).sqrt()
    return F.gelu(F.gelu(h @ weight) @ weight)


torch.manual_seed(0)
SQUARE = tensor(WIDTH, WIDTH, grad=True)
X = tensor(ROWS, WIDTH, grad=True)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a bias": (layers, (tensor(ROWS, WIDTH), SQUARE, tensor(WIDTH, grad=True), tensor(WIDTH, WIDTH, grad=True))),
    "frozen layers": (layers, (X, tensor(WIDTH, WIDTH), tensor(WIDTH), tensor(WIDTH, WIDTH))),
    "part of a bank": (part_of_a_bank, (X, tensor(4 * WIDTH, WIDTH), SQUARE)),
    "three in one": (three_in_one, (X, tensor(3 * WIDTH, WIDTH))),
    "words": (words, (tensor(16, WIDTH, grad=True), SQUARE, torch.randint(16, (ROWS,)))),
    "strides": (by_strides, (X, tensor(2 * ROWS, WIDTH))),
    "a frozen norm": (frozen_norm, (tensor(ROWS, WIDTH), tensor(WIDTH), tensor(WIDTH).abs(), SQUARE)),
}


def cut(traced: Traced) -> joint_graph.Joint:
    """The graph with its snapshots, as planning makes it."""
    joint = as_in_torch(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    joint = replace(joint, readable=readable_inputs(joint, joint_graph.plain_choice(joint)))
    return add_snapshots(joint).joint


def some_plans(problem: Problem) -> list[Plan]:
    """The lowest plan, and such as save some values at random, with what is pinned."""
    planner, rng = Planner(problem), np.random.default_rng(0)
    free = np.array([v.is_saveable for v in problem.values])
    masks = [(rng.random(len(free)) < share) & free for share in (0.0, 0.2, 0.5)]
    return [planner.lowest(), *(planner.plan_of(mask | planner.pinned, None) for mask in masks)]


def test_the_forward_reads_the_input_and_the_backward_its_snapshot() -> None:
    function, arguments = PROGRAMS["a bias"]
    traced = joint_of(function, *arguments)
    joint = cut(traced)
    forward, backward = extract(joint, Planner(build_problem(joint, cost=UnitCost())).lowest())
    words = "primals_2", "primals_3", "addmm"
    assert_expected_inline(
        lines_with(forward.graph, *words),
        """\
permute_6: f64[8, 8] = aten.permute(primals_2, [1, 0])
addmm: f64[64, 8] = aten.addmm(primals_3, primals_1, permute_6)
gelu: f64[64, 8] = aten.gelu(addmm)
snapshot_of_primals_2: f64[8, 8] = aten.clone(primals_2)
snapshot_of_primals_3: f64[8] = aten.clone(primals_3)
return gelu_1, primals_1, primals_4, snapshot_of_primals_2, snapshot_of_primals_3, gelu, mm""",
    )
    assert_expected_inline(
        lines_with(backward.graph, *words),
        """\
permute_6: f64[8, 8] = aten.permute(snapshot_of_primals_2, [1, 0])
addmm: f64[64, 8] = aten.addmm(snapshot_of_primals_3, primals_1, permute_6)
mul_7: f64[64, 8] = aten.mul(addmm, 0.7071067811865476)
mul_9: f64[64, 8] = aten.mul(addmm, addmm)
mul_12: f64[64, 8] = aten.mul(addmm, mul_11)
return None, permute_5, view, mm_1""",
    )


@pytest.mark.parametrize(("function", "arguments"), PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_are_those_of_the_inputs_as_they_were(
    function: Callable[..., Tensor], arguments: tuple[Tensor, ...]
) -> None:
    """Every input that plain torch.compile does not read changes between forward and backward."""
    traced = joint_of(function, *arguments)
    joint = cut(traced)
    assert joint.readable is not None
    assert joint.snapshots, "the program has nothing to cut off"
    before = text(joint.module.graph)
    problem = build_problem(joint, cost=UnitCost())
    num_used = 0
    for plan in some_plans(problem):
        forward, backward = extract(joint, plan)
        assert not unreadable_inputs(joint, backward)
        assert text(joint.module.graph) == before
        _assert_right(traced, joint, forward, backward)
        assert timeline(problem, plan).peak_bytes == plan.peak_bytes
        num_used += any(snapshot.node.name in plan.saved for snapshot in joint.snapshots)
    assert num_used, "no plan reads a snapshot"


def _assert_right(traced: Traced, joint: joint_graph.Joint, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    assert joint.readable is not None
    given = joint.module.graph.find_nodes(op="placeholder")
    inputs = [t.detach().clone() if isinstance(t, Tensor) else t for t in traced.inputs]
    by_name = {node.name: value for node, value in zip(given, inputs, strict=True)}
    results = forward(*(by_name[n.name] for n in forward.graph.find_nodes(op="placeholder")))
    names = [n.name for n in forward.graph.output_node().args[0]]  # type: ignore[union-attr]
    handed = dict(zip(names[traced.num_fwd_outputs :], results[traced.num_fwd_outputs :], strict=True))
    for name, value in by_name.items():
        if name not in joint.readable.names and value.is_floating_point():
            value.fill_(7.0)
    values = by_name | handed
    gradients = backward(*(values[n.name] for n in backward.graph.find_nodes(op="placeholder")))
    for found, expected in zip((*results[: traced.num_fwd_outputs], *gradients), traced.expected, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected)


def test_without_snapshots_it_is_the_problem_of_constant_inputs() -> None:
    function, arguments = PROGRAMS["frozen layers"]
    traced, other = joint_of(function, *arguments), joint_of(function, *arguments)
    problem = build_problem(cut(traced), cost=UnitCost())
    constant = build_problem(as_in_torch(other.module, num_fwd_outputs=1), cost=UnitCost())
    assert without_snapshots(problem) == constant
    assert without_snapshots(problem).key() == constant.key() != problem.key()
    assert without_snapshots(constant) is constant


def sources(name: str) -> list[tuple[int, ...]]:
    function, arguments = PROGRAMS[name]
    return [tuple(s.source.meta["val"].shape) for s in cut(joint_of(function, *arguments)).snapshots]


def test_only_the_part_that_is_read_is_copied() -> None:
    assert sources("part of a bank") == [(WIDTH, WIDTH)]
    assert sources("three in one") == [(WIDTH, WIDTH)] * 3


def test_a_view_by_strides_of_the_storage_is_copied_itself() -> None:
    assert sources("strides") == [(ROWS, WIDTH)]


def test_an_input_that_plain_reads_in_a_checkpointed_region_may_be_read_there_alone() -> None:
    """The scale is read inside the region, which plain torch.compile computes again, and once more outside of it."""

    def region(h: Tensor, scale: Tensor) -> Tensor:
        return (h + scale).sin().exp()

    def function(x: Tensor, scale: Tensor) -> Tensor:
        h = checkpoint(region, x, scale, use_reentrant=False)
        return (h * scale.exp().sum()).sin().exp()

    traced = joint_of(function, X, tensor(WIDTH))
    joint = _tagged(as_in_torch(traced.module, num_fwd_outputs=1))
    readable = readable_inputs(joint, joint_graph.plain_choice(joint))
    assert readable.by_tagged == {"primals_1", "primals_2"}
    copies = add_snapshots(replace(joint, readable=readable)).joint.snapshots
    readers = {reader.name for s in copies for reader, _ in s.reads}
    assert readers == {"exp_1"}


def _tagged(joint: joint_graph.Joint) -> joint_graph.Joint:
    """Tags as Dynamo writes them: AOTAutograd alone runs the region as it is."""
    names = ("add", "sin", "exp", "cos")
    tags = {n: "must_recompute" for n in joint.module.graph.nodes if n.name in names}
    return replace(joint, user_tags=tags)


def test_a_returned_value_that_may_not_run_twice_is_copied() -> None:
    """Random numbers that the caller gets and may change: torch saves them as they are only where a derivative reads them."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand_like(x)
        return (F.gelu(x @ weight) * noise.exp()).sin(), noise.view(-1)

    traced = joint_of(function, X, SQUARE)
    joint = as_in_torch(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    (drawn,) = [n for n in joint.module.graph.nodes if "rand" in n.name]
    joint = replace(
        joint, left_alone=frozenset({drawn}), readable=readable_inputs(joint, joint_graph.plain_choice(joint))
    )
    joint = add_snapshots(joint).joint
    assert drawn in {snapshot.source for snapshot in joint.snapshots}
    _, backward = extract(joint, Planner(build_problem(joint, cost=UnitCost())).lowest())
    assert drawn.name not in {n.name for n in backward.graph.find_nodes(op="placeholder") if n.users}
