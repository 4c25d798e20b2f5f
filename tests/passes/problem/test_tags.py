"""The user's tags that still pin a value, level by level."""

from __future__ import annotations

from dataclasses import replace

from compile_remat.passes import Planner, Problem
from compile_remat.passes.problem.problem import (
    FREE,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    RECOMPUTE,
    SAVE,
)
from compile_remat.passes.problem.tags import LIKE_TORCH, MUST, obeyed_tags, obeying, relaxations
from tests.oracles.random_problems import chain

PINS = {MUST_SAVE: SAVE, PREFER_SAVE: SAVE, MUST_RECOMPUTE: RECOMPUTE, PREFER_RECOMPUTE: RECOMPUTE, "": FREE}


def tagged(*tags: str, length: int = 8) -> Problem:
    """A chain whose first values carry the tags, each pinned as the tag says."""
    problem = chain(length, 8, 10)
    values = list(problem.values)
    for k, tag in enumerate(tags):
        values[k] = replace(values[k], tag=tag, pin=PINS[tag])
    return replace(problem, values=tuple(values))


def pins(problem: Problem) -> list[str]:
    return [v.pin for v in problem.values]


def test_only_the_named_tags_pin() -> None:
    problem = tagged(MUST_SAVE, PREFER_SAVE, MUST_RECOMPUTE, PREFER_RECOMPUTE)
    assert pins(obeying(problem, LIKE_TORCH))[:4] == [SAVE, FREE, RECOMPUTE, RECOMPUTE]
    assert pins(obeying(problem, MUST))[:4] == [SAVE, FREE, RECOMPUTE, FREE]
    assert set(pins(obeying(problem, ()))) == {FREE}


def test_a_pin_with_another_reason_stays() -> None:
    problem = tagged(PREFER_RECOMPUTE)
    values = (problem.values[0], replace(problem.values[1], pin=SAVE), *problem.values[2:])
    assert pins(obeying(replace(problem, values=values), ()))[:2] == [FREE, SAVE]


def test_nothing_to_set_aside_is_the_very_same_problem() -> None:
    problem = tagged(MUST_SAVE, MUST_RECOMPUTE)
    assert obeying(problem, MUST) is problem
    assert [p for p, _ in relaxations(problem)] == [problem]


def test_tags_lapse_in_order() -> None:
    problem = tagged(MUST_SAVE, PREFER_SAVE, PREFER_RECOMPUTE)
    lapsed = [(sorted(lapsed), sorted(obeyed_tags(relaxed))) for relaxed, lapsed in relaxations(problem)]
    assert lapsed == [
        ([], [MUST_SAVE, PREFER_RECOMPUTE, PREFER_SAVE]),
        ([PREFER_SAVE], [MUST_SAVE, PREFER_RECOMPUTE]),
        ([PREFER_RECOMPUTE, PREFER_SAVE], [MUST_SAVE]),
    ]


def test_fewer_tags_never_cost_more() -> None:
    """A plan that a problem allows is allowed with fewer pins, too."""
    problem = tagged(*[PREFER_RECOMPUTE] * 10, *[PREFER_SAVE] * 4, length=16)
    planners = [Planner(relaxed) for relaxed, _ in relaxations(problem)]
    times = [planner.fastest().extra_time_ns + planner.fastest_time_ns for planner in planners]
    peaks = [planner.lowest().peak_bytes for planner in planners]
    assert len(planners) == 3
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
