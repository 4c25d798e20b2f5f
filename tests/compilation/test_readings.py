"""Graphs as they come in before their code: both graphs of a plan are judged together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_remat.compilation.readings import PlanRefused, PlanTaken, Readings
from compile_remat.compilation.region_run import RegionRun
from compile_remat.inductor.observe import Emitted
from tests.compilation.test_region_run import BACKWARD, KIB, NAMES, emitted, forward_returning

FORWARD_GRAPH = forward_returning("b", "x", "a")
BACKWARD_GRAPH = emitted(BACKWARD, NAMES, 1, backward=True)


class Seen:
    """The runs that were judged."""

    def __init__(self) -> None:
        self.runs: list[RegionRun] = []

    def __call__(self, run: RegionRun) -> None:
        self.runs.append(run)


def test_both_graphs_are_judged_together() -> None:
    seen = Seen()
    readings = Readings(seen)
    readings(FORWARD_GRAPH)
    assert not seen.runs
    readings(BACKWARD_GRAPH)
    assert [run.peak_bytes for run in seen.runs] == [3 * KIB]


@pytest.mark.parametrize("stops", [False, True])
def test_a_plan_is_refused_by_its_judge(*, stops: bool) -> None:
    def refuse(run: RegionRun) -> None:
        raise PlanRefused

    readings = Readings(refuse, stops=stops)
    readings(FORWARD_GRAPH)
    with pytest.raises(PlanRefused):
        readings(BACKWARD_GRAPH)


def test_where_no_code_is_wanted_a_plan_that_is_taken_is_left_before_it() -> None:
    seen = Seen()
    readings = Readings(seen, stops=True)
    readings(FORWARD_GRAPH)
    with pytest.raises(PlanTaken):
        readings(BACKWARD_GRAPH)
    assert len(seen.runs) == 1


def test_a_graph_for_inference_is_judged_alone() -> None:
    seen = Seen()
    Readings(seen)(replace(FORWARD_GRAPH, is_inference=True))
    assert len(seen.runs) == 1


def test_graphs_that_make_no_region_are_not_judged() -> None:
    """Nested regions have a forward and a backward each: a plan of ours has one of both."""
    seen = Seen()
    readings = Readings(seen, stops=True)
    for graph in (FORWARD_GRAPH, replace(FORWARD_GRAPH, names=("primals_9",)), BACKWARD_GRAPH):
        readings(graph)
    assert not seen.runs


def test_code_that_no_dry_run_follows_is_not_judged() -> None:
    seen = Seen()
    readings = Readings(seen, stops=True)
    readings(
        Emitted("def call(args):\n    x, = args\n    return (mystery(x),)", FORWARD_GRAPH.inputs, ("x",), 1, False)
    )
    readings(BACKWARD_GRAPH)
    assert not seen.runs
