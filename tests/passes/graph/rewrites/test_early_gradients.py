"""Marks in a joint graph and deliveries in a backward: where they stand, what is copied, when the planner sees a gradient die."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from compile_remat._torch import joint_graph
from compile_remat._torch.delivery.delivery_ops import DELIVER, GRADIENT_READY, Place, receiving
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Plan, Planner, Problem, build_problem, extract
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.reading_kernels import readers_of_memory
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context, RewrittenJoint
from compile_remat.passes.graph.rewrites.early_gradients import deliver_marked, mark_gradients
from tests.passes.joint import Traced, joint_of, text


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def two_layers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a).tanh() @ b


def prepared(traced: Traced) -> joint_graph.Joint:
    joint = as_in_torch(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    return apply_to_joint(joint, Context(splits_convolutions=True)).joint


def marked(traced: Traced, *arguments: int) -> joint_graph.Joint:
    done = mark_gradients(prepared(traced), arguments)
    joint, why_not = done.joint, done.why_not
    assert not why_not
    joint.module.graph.lint()
    return joint


def planned(joint: joint_graph.Joint) -> tuple[Problem, Plan]:
    problem = build_problem(joint, cost=UnitCost())
    return problem, Planner(problem).lowest()


def backward_of(joint: joint_graph.Joint, plan: Plan) -> fx.GraphModule:
    _, backward = extract(joint, plan)
    deliver_marked(backward, joint)
    backward.graph.lint()
    return backward


def test_marks_stand_behind_the_last_step_that_reads_the_parameter() -> None:
    joint = marked(joint_of(two_layers, torch.randn(4, 8), grad(8, 8), grad(8, 8)), 1, 2)
    assert_expected_inline(
        text(joint.module.graph),
        """\
mm: f32[4, 8] = aten.mm(primals_1, primals_2)
tanh: f32[4, 8] = aten.tanh(mm)
alias: f32[4, 8] = aten.alias(tanh)
mm_1: f32[4, 8] = aten.mm(tanh, primals_3)
permute: f32[8, 4] = aten.permute(tanh, [1, 0])
mm_2: f32[8, 8] = aten.mm(permute, tangents_1)
permute_1: f32[8, 8] = aten.permute(primals_3, [1, 0])
mm_3: f32[4, 8] = aten.mm(tangents_1, permute_1)
gradient_ready_default_1: f32[0] = compile_remat.gradient_ready(mm_2, False)
alias_1: f32[4, 8] = aten.alias(alias)
mul: f32[4, 8] = aten.mul(alias_1, alias_1)
sub: f32[4, 8] = aten.sub(1, mul)
mul_1: f32[4, 8] = aten.mul(mm_3, sub)
permute_2: f32[8, 4] = aten.permute(primals_1, [1, 0])
mm_4: f32[8, 8] = aten.mm(permute_2, mul_1)
gradient_ready_default: f32[0] = compile_remat.gradient_ready(mm_4, False)
return mm_1, None, gradient_ready_default, gradient_ready_default_1""",
    )


def scaled_sum(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
    """The gradient of `x` is a sum whose second part reads `w`, and is computed in the kernel of the sum."""
    return (x.tanh() @ a).sum() + (x * w).sum() + x.exp().sum()


def test_a_mark_stands_behind_the_kernel_in_which_the_parameter_is_read() -> None:
    """In front of the sum, the delivery would have its second part written to memory: a tensor more, as in a ViT."""
    joint = marked(joint_of(scaled_sum, grad(8, 8), grad(8, 8), grad(8)), 2)
    (mark,) = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    (primal,) = (n for n in joint.module.graph.find_nodes(op="placeholder") if n.name == "primals_3")
    last = max(
        n for n in joint.module.graph.nodes if str(n.target) == "aten.add.Tensor" and n in joint.info.tangents_closure
    )
    assert mark > last > max(n for n in readers_of_memory(primal) if n in joint.info.tangents_closure)
    _, plan = planned(joint)
    backward = backward_of(joint, plan)
    (delivery,) = backward.graph.find_nodes(op="call_function", target=DELIVER)
    assert delivery > max(n for n in backward.graph.nodes if str(n.target) == "aten.add.Tensor")


def test_a_mark_does_not_wait_for_a_product_that_reads_what_was_made_of_the_parameter() -> None:
    """An operand of a product is written to memory by a kernel of its own."""

    def scaled_product(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        return (x @ a).tanh() * w

    joint = marked(joint_of(scaled_product, grad(8, 8), grad(8, 8), grad(8)), 2)
    products = [
        n for n in joint.module.graph.nodes if str(n.target) == "aten.mm.default" and n in joint.info.tangents_closure
    ]
    (mark,) = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    assert mark < min(products)


def test_a_backward_delivers_and_returns_nothing() -> None:
    joint = marked(joint_of(two_layers, torch.randn(4, 8), grad(8, 8), grad(8, 8)), 1, 2)
    _, plan = planned(joint)
    assert_expected_inline(
        text(backward_of(joint, plan).graph),
        """\
permute: f32[8, 4] = aten.permute(tanh, [1, 0])
mm_2: f32[8, 8] = aten.mm(permute, tangents_1)
permute_1: f32[8, 8] = aten.permute(primals_3, [1, 0])
mm_3: f32[4, 8] = aten.mm(tangents_1, permute_1)
deliver_gradient_default_1 = compile_remat.deliver_gradient(mm_2, [primals_3], 2, 2, 3, False)
mul_1: f32[4, 8] = aten.mul(mm_3, sub)
permute_2: f32[8, 4] = aten.permute(primals_1, [1, 0])
mm_4: f32[8, 8] = aten.mm(permute_2, mul_1)
deliver_gradient_default = compile_remat.deliver_gradient(mm_4, [], 1, 1, 3, False)
return None, None, None""",
    )


def test_deliveries_bring_the_gradients_that_the_joint_graph_returns() -> None:
    traced = joint_of(two_layers, torch.randn(4, 8), grad(8, 8), grad(8, 8))
    expected = dict(enumerate(traced.expected[1:]))
    joint = marked(traced, 1, 2)
    _, plan = planned(joint)
    forward, backward = extract(joint, plan)
    deliver_marked(backward, joint)
    found: dict[int, Tensor] = {}

    def receive(gradient: Tensor, place: Place) -> None:
        assert (place.edge, place.edges) == (place.index, 3)
        found[place.index] = gradient

    with torch.no_grad(), receiving(receive):
        _, *saved = forward(*traced.inputs[:3])
        returned = backward(*saved, *traced.inputs[3:])
    assert list(returned) == [None] * 3
    for index in (1, 2):
        torch.testing.assert_close(found[index], expected[index])


def test_a_gradient_dies_where_it_is_delivered() -> None:
    """Of four gradients, as large as all else together, the planner sees one at a time."""

    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    def peak_bytes(*early: int) -> int:
        traced = joint_of(chain, torch.randn(2, 64), *(grad(64, 64) for _ in range(4)))
        joint = marked(traced, *early) if early else prepared(traced)
        return planned(joint)[1].peak_bytes

    one = 64 * 64 * 4
    assert peak_bytes() > 4 * one
    assert peak_bytes(1, 2, 3, 4) < 1.5 * one
    assert 2 * one < peak_bytes(1, 2, 3) < 2.5 * one


def test_a_parameter_that_is_read_by_what_is_recomputed_is_delivered_behind_that() -> None:
    """`b` is read once more when the plan computes `x @ b` again, behind the product that gives its gradient."""

    def twice(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = (x @ b).sin()
        return (y @ a).sin() * y.sum()

    joint = marked(joint_of(twice, torch.randn(4, 8), grad(8, 8), grad(8, 8)), 1, 2)
    plan = replace(planned(joint)[1], saved=())
    graph = backward_of(joint, plan).graph
    places = {node: k for k, node in enumerate(graph.nodes)}
    deliveries = graph.find_nodes(op="call_function", target=DELIVER)
    assert len(deliveries) == 2
    for delivery in deliveries:
        readers = readers_of_memory(delivery.args[0], *delivery.args[1])
        assert readers and max(places[node] for node in readers) < places[delivery]


@pytest.mark.parametrize("kind", ["shared", "incoming", "parts"])
def test_memory_of_others_is_copied_and_the_copy_counts(kind: str) -> None:
    def shared(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ((x + a + b).sin()) * 2.0

    def incoming(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x.sin() + a + (b * x)

    def parts(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a, b], 1).sin() * torch.cat([x, x], 1)

    function = {"shared": shared, "incoming": incoming, "parts": parts}[kind]
    joint = marked(joint_of(function, torch.randn(8, 8), grad(8, 8), grad(8, 8)), 1, 2)
    marks = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    assert [mark.args[1] for mark in marks].count(True) == (1 if kind == "incoming" else 2)
    problem, _ = planned(joint)
    copied = {step.name: step.workspace_bytes for step in problem.steps if step.name.startswith("gradient_ready")}
    assert copied == {mark.name: 8 * 8 * 4 * bool(mark.args[1]) for mark in marks}


def test_frozen_arguments_and_those_not_asked_for_have_no_mark() -> None:
    joint = marked(joint_of(two_layers, torch.randn(4, 8), grad(8, 8), grad(8, 8)), 0, 2)
    (mark,) = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    assert joint.module.graph.output_node().args[0][3] is mark  # type: ignore[index]


def test_what_cannot_be_marked_says_why() -> None:
    joint = prepared(joint_of(two_layers, grad(4, 8), grad(8, 8), grad(8, 8)))
    assert mark_gradients(joint, ()) == RewrittenJoint(
        0, joint, "no argument that is a leaf and no output gets a gradient"
    )


def test_an_argument_that_an_output_shows_has_no_mark() -> None:
    """Values that the caller computes of that output contribute to the argument's gradient, too."""

    def shown(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return two_layers(x, a, b), a.t(), (b * 2).t()

    joint = prepared(joint_of(shown, torch.randn(4, 8), grad(8, 8), grad(8, 8)))
    joint = mark_gradients(joint, (1, 2)).joint
    (mark,) = joint.module.graph.find_nodes(op="call_function", target=GRADIENT_READY)
    assert mark.meta["compile_remat_gradient"] == 2
