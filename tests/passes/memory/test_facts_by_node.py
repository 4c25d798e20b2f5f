"""Each node of a plan with what was assumed and observed of it."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from compile_remat.passes.memory.facts_by_node import NodeTable, node_facts
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.problem.facts import GraphFacts, KernelFacts, RegionFacts
from compile_remat.passes.problem.problem import EXTERN, POINTWISE, Problem, Step, Value
from tests.oracles.observed_facts import Chosen, any_plan, facts_as_simulated
from tests.oracles.random_problems import problems

LAYERS = Problem(
    (Value("mm", 4096, EXTERN, (), 1), Value("sin", 4096, POINTWISE, (0,), 1), Value("mm_1", 8, EXTERN, (1,), 1)),
    (Step("mul", 4096, POINTWISE, (0,), ()), Step("mm_2", 16, EXTERN, (1,), (0,), is_output=True)),
)


@given(problems, st.randoms(use_true_random=False))
def test_what_does_as_expected_does_not_differ(problem: Problem, rng: random.Random) -> None:
    """No node is told twice; each that runs has the bytes of the simulator on both sides."""
    chosen = any_plan(rng, problem)
    found = candidate_of(problem, chosen.saved, chosen.again)
    rows = node_facts(problem, chosen.plan, facts_as_simulated(found, chosen.offloaded))
    keys = [(row.graph, row.node) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        both = row.assumed_live_bytes, row.observed_live_bytes
        assert both[0] == both[1] or None in both
    in_backward = {node for graph, node in keys if graph == "backward"}
    assert in_backward >= {step.name for step in problem.steps}


def facts(**buffers: int) -> RegionFacts:
    forward = GraphFacts((KernelFacts(("mm",), 4096), KernelFacts(("sin", "copy"), 8192)), {"mm": 4096, "sin": 4096})
    backward = GraphFacts((KernelFacts(("sin", "mul"), 8192), KernelFacts(("mm_2",), 8208)), {"mm_2": 16, **buffers})
    return RegionFacts(forward, backward, 8208)


def test_a_node_that_was_seen_in_registers_differs() -> None:
    rows = node_facts(LAYERS, Chosen(("mm",)).plan, facts(sin=4096))
    assert [(row.graph, row.node) for row in rows if row.differs] == [("forward", "mm_1"), ("backward", "mul")]
    by_key = {(row.graph, row.node): row for row in rows}
    assert by_key["backward", "mul"].observed_bytes == 0 and ("forward", "copy") not in by_key
    assert by_key["backward", "sin"] == replace(
        by_key["backward", "sin"], observed_bytes=4096, observed_live_bytes=8192
    )
    assert [row.graph for row in rows] == sorted((row.graph for row in rows), reverse=True)


def test_the_table_has_a_line_for_each_node() -> None:
    rows = node_facts(LAYERS, Chosen(("mm",)).plan, facts(mul=4096))
    lines = str(rows).splitlines()
    assert len(lines) == len(rows) + 2 and lines[0].split() == [
        *("graph", "node", "assumed", "observed", "live,", "assumed", "live,", "observed")
    ]
    mm = next(line for line in lines if " mm " in line)
    assert mm.split() == ["forward", "mm", "4.0", "KiB", "4.0", "KiB", "4.0", "KiB", "4.0", "KiB"]
    assert len(str(NodeTable()).splitlines()) == 2
