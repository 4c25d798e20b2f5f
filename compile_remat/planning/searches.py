"""Keeps the planners of one graph, so that no round repeats the search of an earlier round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compile_remat.passes import Link, Planner, Problem
from compile_remat.passes.problem.work_budget import CLOCK

KEPT = 2
"""Planners that are kept, at most: the planner of the last plan, and the one that predicted the next plan."""


class Searches:
    """The last planners of one graph.

    A planner's answers do not depend on the order of its questions, so a plan is the same with a kept or a new planner.  This
    object is therefore no part of a cache key, and its copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._kept: list[Planner] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (Searches, ())

    def planner(
        self,
        problem: Problem,
        work_seconds: float | None,
        is_over: Callable[[], bool] | None = None,
        link: Link | None = None,
    ) -> Planner:
        """Returns a kept planner of the same problem, work limit and link whose search no clock has ended; else a new one."""
        same = (each for each in self._kept if (each.work_seconds, each.link) == (work_seconds, link))
        known = (each for each in same if each.problem == problem)
        planner = next((each for each in known if CLOCK not in each.ends), None)
        if planner is None:
            planner = Planner(problem, work_seconds, is_over, link=link)
        planner.work.is_over = is_over
        self._kept = [planner, *(each for each in self._kept if each is not planner)][:KEPT]
        return planner

    def clear(self) -> None:
        """Drop all planners."""
        self._kept = []
