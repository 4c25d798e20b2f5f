"""The list of rewrites: what it has, in which order, which of them run on a graph, and what is logged of each."""

from __future__ import annotations

import logging

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.rewrite_list import REWRITES, apply, apply_to_joint
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from tests.passes.joint import joint_of, text


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "compile_remat"]


def test_the_list() -> None:
    assert_expected_inline(
        "\n".join(f"{rewrite.stage:9} {rewrite.name}" for rewrite in REWRITES),
        """\
program   inline_regions
joint     replace_shape_only_inputs
joint     split_convolution_gradients
joint     separate_sigmoids
joint     move_weight_gradients_up
joint     make_sibling_gradients_together
joint     run_user_passes
joint     mark_gradients
joint     add_snapshots
extracted copy_values
extracted write_to_memory
forward   unroll_sliced_calls
backward  deliver_marked
backward  unroll_sliced_calls
backward  lay_gradients_out_once
backward  keep_matmuls_in_place""",
    )


def test_each_reason_is_one_line() -> None:
    assert all(rewrite.why and "\n" not in rewrite.why and len(rewrite.why) <= 100 for rewrite in REWRITES)


def test_what_runs_is_logged_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    """Neither convolutions, early gradients nor snapshots are asked for: these rewrites do not run."""

    def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    inputs = (grad(64, 4), grad(32, 4), grad(32), grad(4, 32), grad(4))
    joint = as_in_torch(joint_of(layers, *inputs, decompositions={}).module, num_fwd_outputs=1)
    with caplog.at_level(logging.DEBUG, "compile_remat"):
        done = apply_to_joint(joint, Context())
    assert done.count == 1 and done.joint is joint and not done.why_not
    assert_expected_inline(
        "\n".join(logged(caplog)),
        """\
joint: replace_shape_only_inputs: 0, nodes 29 -> 29
joint: separate_sigmoids: 0, nodes 29 -> 29
joint: move_weight_gradients_up: 1, nodes 29 -> 29
joint: make_sibling_gradients_together: 0, nodes 29 -> 29""",
    )


def test_rewrites_that_are_named_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    joint = as_in_torch(joint_of(lambda x, w: x @ w, grad(4, 8), grad(8, 8)).module, num_fwd_outputs=1)
    with caplog.at_level(logging.DEBUG, "compile_remat"):
        apply_to_joint(joint, Context(splits_convolutions=True), only=["split_convolution_gradients", "add_snapshots"])
    assert [line.split(":")[1].strip() for line in logged(caplog)] == [
        "split_convolution_gradients"
    ]  # no snapshots are wanted
    with pytest.raises(ValueError, match="no rewrite of a joint graph: no_such_rewrite"):
        apply_to_joint(joint, Context(), only=["no_such_rewrite"])


def test_a_graph_without_a_backward_stays() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("primals_1"),)),))
    graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(2)
    joint = as_in_torch(fx.GraphModule(torch.nn.Module(), graph), num_fwd_outputs=1)
    before = text(joint.module.graph)
    assert apply_to_joint(joint, Context(splits_convolutions=True, has_snapshots=True)).count == 0
    assert text(joint.module.graph) == before


def test_a_graph_that_no_compiler_of_ours_gets_is_left_as_it_is() -> None:
    module = joint_of(lambda a, b, c: a @ b + c @ c @ c, grad(8, 8), grad(8, 8), grad(8, 8)).module
    assert apply(Stage.BACKWARD, module, Context()).count == 0
    assert apply(Stage.BACKWARD, module, Context(by_inductor=True)).count == 0
    assert apply(Stage.BACKWARD, module, Context(by_inductor=True, guarded=True)).count > 0
