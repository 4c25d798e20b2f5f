"""Sets aside some of a user's tags if no plan meets the budget with all of them: `Problem` -> `Problem` with fewer pins.

`build_problem` pins every tagged value as its tag says.  Tags are given up in the order of `LAPSING`, and no more of them than
necessary: first PREFER_SAVE, which torch's own partitioner does not obey at all; then PREFER_RECOMPUTE, the tag that
``torch.utils.checkpoint`` puts on a whole region.  MUST_SAVE and MUST_RECOMPUTE are never given up, because torch's documentation
says that no other system may override these tags.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from compile_remat.passes.problem.problem import (
    FREE,
    MUST_RECOMPUTE,
    MUST_SAVE,
    PREFER_RECOMPUTE,
    PREFER_SAVE,
    Problem,
)

LAPSING = (PREFER_SAVE, PREFER_RECOMPUTE)
"""Tags that the planner sets aside, in this order, if no plan meets the budget otherwise."""

MUST = frozenset({MUST_SAVE, MUST_RECOMPUTE})
"""Tags that a plan obeys at every budget."""

LIKE_TORCH = MUST | {PREFER_RECOMPUTE}
"""Tags that torch's own partitioner obeys: the partitioner treats MUST_RECOMPUTE and PREFER_RECOMPUTE alike."""


def obeyed_tags(problem: Problem) -> frozenset[str]:
    """The tags that pin a value of the problem."""
    return frozenset(v.tag for v in problem.values if v.pin != FREE and v.tag)


def obeying(problem: Problem, tags: Collection[str]) -> Problem:
    """Returns the problem with only `tags` obeyed, values with any other tag free; the same object if no other tag pins a value."""
    if obeyed_tags(problem) <= frozenset(tags):
        return problem
    return replace(problem, values=tuple(v if v.tag in ("", *tags) else replace(v, pin=FREE) for v in problem.values))


def relaxations(problem: Problem) -> Iterator[tuple[Problem, frozenset[str]]]:
    """Yields the problem itself, then problems that obey fewer and fewer tags, each with the tags that are set aside."""
    tags, lapsed = obeyed_tags(problem), frozenset[str]()
    yield problem, lapsed
    for tag in LAPSING:
        if tag in tags:
            lapsed |= {tag}
            yield obeying(problem, tags - lapsed), lapsed
