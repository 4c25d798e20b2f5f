"""Sliced calls as calls of one body: the same numbers, and sums that are added to between the calls."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

from compile_remat.cost_models import UnitCost
from compile_remat.passes.graph.build import build_problem
from compile_remat.passes.graph.slices.largest import slice_largest
from compile_remat.passes.graph.slices.unrolling import unroll_sliced_calls
from tests.passes.joint import check_rewrite, joint_of

REGION = torch.ops.higher_order.invoke_subgraph


def loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.t(), labels)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and labels."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 4, generator=generator).requires_grad_()
    head = torch.randn(64, 4, generator=generator).requires_grad_()
    return hidden, head, torch.randint(0, 64, (12,), generator=generator)


def test_each_slice_is_a_call_of_one_body() -> None:
    def rewrite(module: fx.GraphModule) -> int:
        slice_largest(module, 3, num_fwd_outputs=1)
        return unroll_sliced_calls(module).count

    done = check_rewrite(joint_of(loss, *tokens(), decompositions=select_decomp_table()), rewrite)
    assert done.result == 2
    calls = done.module.graph.find_nodes(op="call_function", target=REGION)
    assert len(calls) == 6 and len({call.args[1] for call in calls}) == 2
    backward = [call for call in calls if call.args[1] == calls[-1].args[1]]
    for before, after in itertools.pairwise(backward):
        token = after.args[-1]
        assert isinstance(token, fx.Node) and token.target is torch.ops.aten.as_strided.default
        (total,) = token.all_input_nodes
        part = total.args[-1] if total.target is torch.ops.aten.add.Tensor else total
        assert isinstance(part, fx.Node) and part.args == (before, 1), "the gradient of the slice before is in the sum"


def test_the_time_of_slices_has_that_of_adding_their_parts() -> None:
    """A call for each slice, and an addition between two of them: t(n) = n body + (n - 1) addition."""
    given = joint_of(loss, *tokens(), decompositions=select_decomp_table())

    def time_ns(slices: int) -> int:
        graph = slice_largest(copy.deepcopy(given.module), slices, num_fwd_outputs=1, at_once=True)
        problem = build_problem(graph.module, num_fwd_outputs=1, cost=UnitCost())
        return max(value.time_ns for value in problem.values if value.name.startswith("run_slices"))

    two, three = time_ns(2), time_ns(3)
    body_and_addition = three - two
    assert 0 < 2 * body_and_addition - two < body_and_addition
