"""Pictures of a plan, from the problem that it solves."""

from dataclasses import replace

from compile_remat.passes import Link, Planner
from compile_remat.passes.pictures.plan_pictures import PlanPictures, StoredPictures
from compile_remat.passes.problem.problem import Pin, Tag
from tests.oracles.random_problems import chain
from tests.oracles.scaled import BYTES, TIMES, scaled


def test_a_plan_that_sets_tags_aside_can_be_looked_at() -> None:
    """The lowest plan may save what a checkpoint of the model says to compute again."""
    free = chain(12)
    plan = Planner(free).within(9)
    tagged = replace(free, values=tuple(replace(v, pin=Pin.RECOMPUTE, tag=Tag.MUST_RECOMPUTE) for v in free.values))
    pictures, expected = PlanPictures(tagged), PlanPictures(free)
    assert pictures.modules(plan) == expected.modules(plan) != ()
    assert pictures.step(plan).live_bytes == expected.step(plan).live_bytes


def test_the_frontier_has_both_curves_where_plans_may_move_tensors_and_a_file_keeps_the_link() -> None:
    problem = scaled(chain(16))
    bytes_per_s = BYTES * 10**9 // (2 * TIMES)
    pictures = PlanPictures(problem, link=Link(bytes_per_s, bytes_per_s, 1 << 50))
    plan = Planner(problem).within(10 * BYTES)
    points = pictures.frontier(plan, 5)
    without = [point for point in points if point.moves_nothing]
    assert without and min(p.peak_bytes for p in points) < min(p.peak_bytes for p in without)
    assert StoredPictures(pictures.to_text()).frontier(plan, 5) == points
    assert not any(point.moves_nothing for point in PlanPictures(problem).frontier(plan, 5))
