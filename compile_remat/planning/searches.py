"""Keeps the planners of one graph, so that no round searches for a plan that another one has found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_remat.passes import CLOCK, Planner, Problem

KEPT = 2
"""Planners that are kept, at most: the one of the last plan, and the one that was asked what the next plan promises."""


class Searches:
    """The last planners of one graph.

    A planner's answers are the same in whatever order it is asked, so a plan does not depend on whether its planner was kept, and
    this is no part of a cache key: copied or pickled, it is empty.
    """

    def __init__(self) -> None:
        self._kept: list[Planner] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (Searches, ())

    def planner(
        self, problem: Problem, work_seconds: float | None, is_over: Callable[[], bool] | None = None
    ) -> Planner:
        """A planner as `Planner` makes it: one that is kept, where it has the same problem and limit and no clock has ended it."""
        known = (each for each in self._kept if each.work_seconds == work_seconds and each.problem == problem)
        planner = next((each for each in known if CLOCK not in each.ends), None)
        if planner is None:
            planner = Planner(problem, work_seconds, is_over)
        planner.work.is_over = is_over
        self._kept = [planner, *(each for each in self._kept if each is not planner)][:KEPT]
        return planner

    def clear(self) -> None:
        """Let go of all planners."""
        self._kept = []
