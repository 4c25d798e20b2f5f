"""What is left of a user's tags when a budget cannot be met with all of them: `Problem` -> `Problem` with fewer pins.

`build_problem` pins every tagged value as its tag says.  Tags are given up in the order of `LAPSING`, no more of them than
it takes: first PREFER_SAVE, which torch's own partitioner does not obey at all; then PREFER_RECOMPUTE, which is what
``torch.utils.checkpoint`` puts on a whole region; MUST_SAVE and MUST_RECOMPUTE never, since torch's documentation says
of these that no other system may override them.
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
"""Tags that a budget sets aside where it cannot be met otherwise, in that order."""

MUST = frozenset({MUST_SAVE, MUST_RECOMPUTE})
"""What every budget obeys."""

LIKE_TORCH = MUST | {PREFER_RECOMPUTE}
"""What torch's own partitioner obeys: it makes no difference between the two ways to ask for a recomputation."""


def obeyed_tags(problem: Problem) -> frozenset[str]:
    """The tags that pin a value of the problem."""
    return frozenset(v.tag for v in problem.values if v.pin != FREE and v.tag)


def obeying(problem: Problem, tags: Collection[str]) -> Problem:
    """The problem in which values with any other tag are free; the very same one where there are none."""
    if obeyed_tags(problem) <= frozenset(tags):
        return problem
    return replace(problem, values=tuple(v if v.tag in ("", *tags) else replace(v, pin=FREE) for v in problem.values))


def relaxations(problem: Problem) -> Iterator[tuple[Problem, frozenset[str]]]:
    """Problems with fewer and fewer of the tags obeyed, each with the tags that lapsed; the problem itself comes first."""
    tags, lapsed = obeyed_tags(problem), frozenset[str]()
    yield problem, lapsed
    for tag in LAPSING:
        if tag in tags:
            lapsed |= {tag}
            yield obeying(problem, tags - lapsed), lapsed
