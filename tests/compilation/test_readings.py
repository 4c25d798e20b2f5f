"""Graphs as they come in before their code: the first one begins a round, both together are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_remat.compilation.readings import PlanRefused, Readings
from compile_remat.compilation.region_run import RegionRun
from compile_remat.inductor.observe import Emitted
from tests.compilation.test_region_run import BACKWARD, KIB, NAMES, emitted, forward_returning

FORWARD_GRAPH = forward_returning("b", "x", "a")
BACKWARD_GRAPH = emitted(BACKWARD, NAMES, 1, backward=True)


def nothing() -> None:
    pass


class Seen:
    """What was said to a compilation, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.runs: list[RegionRun] = []

    def begun(self) -> None:
        self.said.append("begun")

    def judge(self, run: RegionRun) -> None:
        self.said.append("judged")
        self.runs.append(run)


def test_the_first_graph_begins_the_round_and_both_are_judged() -> None:
    seen = Seen()
    readings = Readings(seen.begun, seen.judge)
    readings(FORWARD_GRAPH)
    assert seen.said == ["begun"]
    readings(BACKWARD_GRAPH)
    assert seen.said == ["begun", "judged"]
    assert seen.runs[0].peak_bytes == 3 * KIB


def test_the_run_has_the_facts_of_graphs_that_were_read() -> None:
    seen = Seen()
    readings = Readings(seen.begun, seen.judge)
    readings(replace(FORWARD_GRAPH, nodes_of={"a": ("mm",), "b": ("sin",)}))
    readings(replace(BACKWARD_GRAPH, nodes_of={"g": ("mul",), "h": ("mm_1",)}))
    facts = seen.runs[0].facts
    assert facts is not None and facts.peak_bytes == 3 * KIB
    assert facts.forward.stored == {"mm": KIB, "sin": KIB}
    assert facts.backward.computed == {"mul", "mm_1"}


def test_a_round_that_is_not_worth_it_ends_before_its_backward() -> None:
    def refuse() -> None:
        raise PlanRefused

    seen = Seen()
    with pytest.raises(PlanRefused):
        Readings(refuse, seen.judge)(FORWARD_GRAPH)
    assert not seen.runs


def test_a_plan_is_refused_by_its_judge() -> None:
    def refuse(run: RegionRun) -> None:
        raise PlanRefused

    readings = Readings(nothing, refuse)
    readings(FORWARD_GRAPH)
    with pytest.raises(PlanRefused):
        readings(BACKWARD_GRAPH)


def test_a_graph_for_inference_is_judged_alone() -> None:
    seen = Seen()
    Readings(seen.begun, seen.judge)(replace(FORWARD_GRAPH, is_inference=True))
    assert seen.said == ["begun", "judged"]


def test_graphs_that_make_no_region_are_not_judged() -> None:
    """Nested regions have a forward and a backward each: a plan of ours has one of both."""
    seen = Seen()
    readings = Readings(seen.begun, seen.judge)
    for graph in (FORWARD_GRAPH, replace(FORWARD_GRAPH, names=("primals_9",)), BACKWARD_GRAPH):
        readings(graph)
    assert seen.said == ["begun"]


def test_code_that_no_dry_run_follows_is_not_judged() -> None:
    seen = Seen()
    readings = Readings(seen.begun, seen.judge)
    readings(
        Emitted("def call(args):\n    x, = args\n    return (mystery(x),)", FORWARD_GRAPH.inputs, ("x",), 1, False)
    )
    readings(BACKWARD_GRAPH)
    assert seen.said == ["begun"]
