"""Passes of the user: a pass on a graph that can be read, the new classification, and what is refused of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from compile_remat._torch import joint_graph
from compile_remat._util.user_pass import UserPass
from compile_remat.errors import PassError
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.outputs import changeable_outputs, left_alone
from compile_remat.passes.graph.rewrite_list import apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context
from compile_remat.passes.graph.rewrites.user_passes import run_user_passes
from compile_remat.passes.graph.snapshots import readable_inputs
from tests.passes.joint import check_rewrite, joint_of

aten = torch.ops.aten


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def squared(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().pow(2)


def prepared(module: fx.GraphModule, num_fwd_outputs: int = 1) -> joint_graph.Joint:
    """The joint graph as a plan has it before rewrites."""
    joint = as_in_torch(module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=[1])
    plain = joint_graph.plain_choice(joint)
    alone = left_alone(changeable_outputs(joint), plain)
    return replace(joint, readable=readable_inputs(joint, plain), left_alone=alone)


def given(run: Callable[[fx.Graph], object]) -> tuple[UserPass, ...]:
    return (UserPass(run, "given", "1"),)


def products(graph: fx.Graph) -> None:
    """`pow(x, 2)` becomes `x * x`."""
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        if node.args[1] == 2:
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)


def test_a_pass_is_counted_where_it_changes_the_graph() -> None:
    counts = list[int]()

    def rewrite(module: fx.GraphModule) -> None:
        both = (*given(products), *given(lambda graph: None))
        counts.append(apply_to_joint(prepared(module), Context(passes=both), only=["run_user_passes"]).count)

    done = check_rewrite(joint_of(squared, grad(4, 8), grad(8, 8)), rewrite)
    assert counts == [1]
    assert "aten.pow(sin, 2)" in done.before and "aten.mul(sin, sin)" in done.after


def test_the_log_says_how_many_nodes_a_pass_changed(caplog: pytest.LogCaptureFixture) -> None:
    """A pass that finds nothing to change is visible: here one that looks for an operator that the graph does not have."""

    def without_dropout(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
            graph.erase_node(node)

    def other_side(graph: fx.Graph) -> None:
        (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
        node.target = aten.cos.default

    both = (UserPass(without_dropout, "without_dropout"), UserPass(products, "products"), UserPass(other_side, "other"))
    with caplog.at_level("INFO", "compile_remat"):
        done = run_user_passes(prepared(joint_of(squared, grad(4, 8), grad(8, 8)).module), both)
    assert done.count == 2
    assert (
        [record.getMessage() for record in caplog.records]
        == [
            "joint_passes: pass without_dropout changed 0 nodes",
            "joint_passes: pass products changed 3 nodes",  # the product is new, the square is gone, the output reads another
            "joint_passes: pass other changed 1 nodes",
        ]
    )


def test_the_graph_is_classified_anew() -> None:
    """The product is one of the forward's nodes and an output; what torch knew of the inputs stays."""
    before = prepared(joint_of(squared, grad(4, 8), grad(8, 8)).module)
    after = run_user_passes(before, given(products)).joint
    (product,) = after.fwd_outputs
    assert product.target is aten.mul.Tensor and after.info.is_required_fw(product)
    assert [n.name for n in after.info.static_lifetime_input_nodes] == ["primals_2"]
    assert set(after.info.tangents_closure) <= set(after.module.graph.nodes)
    assert after.readable == before.readable


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_output_that_the_caller_may_change_stays_one(is_alone: bool) -> None:
    """The memory of the output is read again: if no plan may save it, none may, whichever node computes it."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        made = (x @ w).sin().pow(2)
        return made.view(-1), (made * made).sum()

    before = prepared(joint_of(function, grad(4, 8), grad(8, 8)).module, num_fwd_outputs=2)
    assert [n.target for n in changeable_outputs(before)] == [aten.pow.Tensor_Scalar]
    before = replace(before, left_alone=changeable_outputs(before) if is_alone else frozenset())
    after = run_user_passes(before, given(products)).joint
    assert [n.target for n in changeable_outputs(after)] == [aten.mul.Tensor]
    assert after.left_alone == (changeable_outputs(after) if is_alone else frozenset())


def test_a_new_node_has_the_policy_of_the_one_that_it_replaces() -> None:
    joint = prepared(joint_of(squared, grad(4, 8), grad(8, 8)).module)
    (old,) = (n for n in joint.fwd_outputs if n.target is aten.pow.Tensor_Scalar)
    old.meta["recompute"] = joint_graph.USER_TAGS[0]
    after = run_user_passes(replace(joint, user_tags={old: "must_save"}), given(products)).joint
    assert {node.target: tag for node, tag in after.user_tags.items()} == {aten.mul.Tensor: "must_save"}


def ill_formed(graph: fx.Graph) -> None:
    first, *_, last = (node for node in graph.nodes if node.op == "call_function")
    first.prepend(last)  # in front of what it reads


def without_value(graph: fx.Graph) -> None:
    products(graph)
    del graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0].meta["val"]


def half_as_large(graph: fx.Graph) -> None:
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        part = graph.call_function(aten.slice.Tensor, (returned[0], 0, 0, 2))
    part.meta = {**returned[0].meta, "val": returned[0].meta["val"][:2]}
    output.args = ((part, *returned[1:]), *output.args[1:])


def in_single_precision(graph: fx.Graph) -> None:
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    with graph.inserting_before(output):
        part = graph.call_function(torch.ops.prims.convert_element_type.default, (returned[2], torch.float32))
    part.meta = {**returned[2].meta, "val": returned[2].meta["val"].float()}
    output.args = ((*returned[:2], part), *output.args[1:])


def one_output_less(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = (output.args[0][:-1], *output.args[1:])  # type: ignore[index]


def one_input_more(graph: fx.Graph) -> None:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        graph.placeholder("primals_9")


def in_place(graph: fx.Graph) -> None:
    node = graph.find_nodes(op="call_function", target=aten.sin.default)[0]
    with graph.inserting_after(node):
        added = graph.call_function(aten.neg_.default, (node,))
    added.meta = dict(node.meta)


def of_one_element(graph: fx.Graph) -> None:
    """Sizes that are copied from a wrong node broadcast, and lint sees nothing."""
    products(graph)
    (product,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)[:1]
    product.meta["val"] = product.meta["val"][:1, :1]


def of_another_type(graph: fx.Graph) -> None:
    products(graph)
    (product,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)[:1]
    product.meta["val"] = product.meta["val"].float()


def of_other_strides(graph: fx.Graph) -> None:
    products(graph)
    (product,) = graph.find_nodes(op="call_function", target=aten.mul.Tensor)[:1]
    product.meta["val"] = product.meta["val"].t().contiguous().t()


def changed_to_write(graph: fx.Graph) -> None:
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    node.target = aten.sin_.default


def changed_to_sum(graph: fx.Graph) -> None:
    """An old node has another operator, whose result is smaller than its value still says."""
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    node.target, node.args = aten.sum.dim_IntList, (node.args[0], [0], True)


def changed_with_its_value(graph: fx.Graph) -> None:
    """The value of the changed node is true; those of its readers are no longer."""
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    node.target, node.args = aten.sum.dim_IntList, (node.args[0], [0], True)
    node.meta["val"] = node.meta["val"][:1]


def of_sizes_that_do_not_fit(graph: fx.Graph) -> None:
    (node,) = graph.find_nodes(op="call_function", target=aten.sin.default)
    with graph.inserting_before(node):
        added = graph.call_function(aten.mm.default, (node.args[0], node.args[0]))
    added.meta = dict(node.meta)
    node.args = (added,)


def broken(graph: fx.Graph) -> None:
    raise KeyError("no such node")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (ill_formed, "failed: RuntimeError: "),
        (broken, "failed: KeyError: 'no such node'"),
        (without_value, 'gave its node mul_tensor no meta["val"]'),
        (half_as_large, "changed output 0 from float64[4, 8] on cpu to float64[2, 8] on cpu"),
        (in_single_precision, "changed output 2 from float64[8, 8] on cpu to float32[8, 8] on cpu"),
        (one_output_less, "changed output 2 from float64[8, 8] on cpu to nothing"),
        (one_input_more, "changed input 3 from nothing to primals_9"),
        (in_place, "added neg__default, which writes in place"),
        (changed_to_write, "changed sin, which writes in place"),
        (
            of_one_element,
            'left the node mul_tensor with a meta["val"] of float64[1, 1], and aten.mul.Tensor gives float64[4, 8]',
        ),
        (
            of_another_type,
            'left the node mul_tensor with a meta["val"] of float32[4, 8], and aten.mul.Tensor gives float64[4, 8]',
        ),
        (
            of_other_strides,
            'left the node mul_tensor with a meta["val"] of float64[4, 8] with strides [1, 4], and aten.mul',
        ),
        (
            changed_to_sum,
            'left the node sin with a meta["val"] of float64[4, 8], and aten.sum.dim_IntList gives float64[1, 8]',
        ),
        (changed_with_its_value, 'left the node pow_1 with a meta["val"] of float64[4, 8], and aten.pow'),
        (of_sizes_that_do_not_fit, "left the node mm_default, whose operator refuses its arguments: RuntimeError: "),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(run: Callable[[fx.Graph], object], said: str) -> None:
    joint = prepared(joint_of(squared, grad(4, 8), grad(8, 8)).module)
    with pytest.raises(PassError) as caught:
        run_user_passes(joint, (UserPass(run, "the_pass", "1"),))
    assert f"joint_passes: the pass the_pass {said}" in str(caught.value)
    assert (caught.value.name, caught.value.problem.startswith(said)) == ("the_pass", True)
