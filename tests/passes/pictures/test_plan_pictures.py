"""Pictures of a plan, from the problem that it solves."""

from dataclasses import replace

from compile_remat.passes import Planner
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.passes.problem.problem import Pin, Tag
from tests.oracles.random_problems import chain


def test_a_plan_that_sets_tags_aside_can_be_looked_at() -> None:
    """The lowest plan may save what a checkpoint of the model says to compute again."""
    free = chain(12)
    plan = Planner(free).within(9)
    tagged = replace(free, values=tuple(replace(v, pin=Pin.RECOMPUTE, tag=Tag.MUST_RECOMPUTE) for v in free.values))
    pictures, expected = PlanPictures(tagged), PlanPictures(free)
    assert pictures.modules(plan) == expected.modules(plan) != ()
    assert pictures.step(plan).live_bytes == expected.step(plan).live_bytes
