"""Saved tensors that wait on the host: golden graphs, the order of the operators, the same numbers; and plans that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from compile_remat._torch import joint_graph
from compile_remat._torch.offload.offload_ops import ARRIVE, FETCH, RELEASE, STASH
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Plan, Planner, build_problem, extract
from compile_remat.passes.problem.plan import Offloaded
from tests.passes.joint import Traced, joint_of, text


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ w).sin()
    return x


def traced() -> Traced:
    torch.manual_seed(0)
    return joint_of(chain, *(torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)))


def planned(graph: Traced, *offloaded: Offloaded) -> tuple[joint_graph.Joint, Plan]:
    joint = joint_graph.prepare(graph.module, num_fwd_outputs=graph.num_fwd_outputs)
    planner = Planner(build_problem(joint, cost=UnitCost()))
    plan = planner.plan_of(planner.mask_of(["mm", "mm_1", "mm_2", "sin"]), None)
    return joint, replace(plan, offloaded=offloaded)


def modules_of(*offloaded: Offloaded) -> tuple[fx.GraphModule, fx.GraphModule]:
    return extract(*planned(traced(), *offloaded))


def test_golden_graphs() -> None:
    forward, backward = modules_of(Offloaded("mm", release_before="mm_2", fetch_before="mm_4"))
    assert_expected_inline(
        text(forward.graph),
        """\
mm: f64[8, 8] = aten.mm(primals_1, primals_2)
stash_default = compile_remat.stash(mm)
mm__host: f64[8, 8] = getitem(stash_default, 0)
mm__ticket: i64[] = getitem(stash_default, 1)
sin: f64[8, 8] = aten.sin(mm)
mm_1: f64[8, 8] = aten.mm(sin, primals_2)
sin_1: f64[8, 8] = aten.sin(mm_1)
release_default = compile_remat.release(mm, mm__ticket)
mm_2: f64[8, 8] = aten.mm(sin_1, primals_2)
sin_2: f64[8, 8] = aten.sin(mm_2)
return sin_2, primals_1, primals_2, mm__host, mm__ticket, sin, mm_1, mm_2""",
    )
    assert_expected_inline(
        text(backward.graph),
        """\
cos: f64[8, 8] = aten.cos(mm_2)
mul: f64[8, 8] = aten.mul(tangents_1, cos)
sin_1: f64[8, 8] = aten.sin(mm_1)
permute: f64[8, 8] = aten.permute(sin_1, [1, 0])
mm_3: f64[8, 8] = aten.mm(permute, mul)
permute_1: f64[8, 8] = aten.permute(primals_2, [1, 0])
fetch_default = compile_remat.fetch(mm__host, mm__ticket, cpu)
mm__fetched: f64[8, 8] = getitem(fetch_default, 0)
mm__arrival: i64[] = getitem(fetch_default, 1)
mm_4: f64[8, 8] = aten.mm(mul, permute_1)
cos_1: f64[8, 8] = aten.cos(mm_1)
mul_1: f64[8, 8] = aten.mul(mm_4, cos_1)
permute_2: f64[8, 8] = aten.permute(sin, [1, 0])
mm_5: f64[8, 8] = aten.mm(permute_2, mul_1)
mm_6: f64[8, 8] = aten.mm(mul_1, permute_1)
add: f64[8, 8] = aten.add(mm_3, mm_5)
mm: f64[8, 8] = compile_remat.arrive(mm__fetched, mm__host, mm__arrival)
cos_2: f64[8, 8] = aten.cos(mm)
mul_2: f64[8, 8] = aten.mul(mm_6, cos_2)
permute_4: f64[8, 8] = aten.permute(primals_1, [1, 0])
mm_7: f64[8, 8] = aten.mm(permute_4, mul_2)
mm_8: f64[8, 8] = aten.mm(mul_2, permute_1)
add_1: f64[8, 8] = aten.add(add, mm_7)
return mm_8, add_1""",
    )


@pytest.mark.parametrize("names", [["mm"], ["mm_1"], ["mm", "mm_1", "sin"]])
def test_the_same_numbers(names: list[str]) -> None:
    graph = traced()
    joint, plan = planned(graph, *map(Offloaded, names))
    forward, backward = extract(joint, plan)
    count = graph.num_fwd_outputs
    inputs, tangents = graph.inputs[:-count], graph.inputs[-count:]
    made = forward(*inputs)
    gradients = backward(*made[count:], *tangents)
    found = [*made[:count], *gradients]
    assert all(torch.equal(a, b) for a, b in zip(found, graph.module(*graph.inputs), strict=True))


def test_readers_stand_between_the_operators() -> None:
    for module, first, last in zip(modules_of(Offloaded("mm")), (STASH, FETCH), (RELEASE, ARRIVE), strict=True):
        nodes = list(module.graph.nodes)
        begin, end = (next(k for k, n in enumerate(nodes) if n.target is target) for target in (first, last))
        assert begin < end
        for reader in nodes[end].all_input_nodes[0].users if last is RELEASE else nodes[end].users:
            assert (nodes.index(reader) <= end) == (last is RELEASE)


@pytest.mark.parametrize(
    ("offloaded", "message"),
    [
        (Offloaded("nothing"), "'nothing', which the graph does not have"),
        (Offloaded("primals_2"), "'primals_2', which the forward does not compute"),
        (Offloaded("mm", release_before="nothing"), "at 'nothing', which the graph does not have"),
        (Offloaded("mm", fetch_before="nothing"), "at 'nothing', which the graph does not have"),
        (Offloaded("sin_1"), "'sin_1', which the forward does not compute and hand over once"),
    ],
)
def test_a_plan_of_another_graph_is_refused(offloaded: Offloaded, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        modules_of(offloaded)
