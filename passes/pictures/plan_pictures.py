"""The data by which a plan can be drawn later: the plan's problem, and the memory that plain torch.compile would take."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property

import numpy as np

from compile_remat._util import json_values
from compile_remat.pages.figures import FASTEST, PLAIN, FrontierPoint, ModuleRow, StepFigures
from compile_remat.passes.memory.candidate_plan import Candidate, candidate
from compile_remat.passes.memory.facts_by_node import NodeTable, node_facts
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.pictures.module_rows import rows_of_modules
from compile_remat.passes.pictures.step_figures import figures_of_step
from compile_remat.passes.problem.facts import Levels, PlainFacts, RegionFacts
from compile_remat.passes.problem.plan import Plan
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.tags import LIKE_TORCH, obeying
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.pareto import curves
from compile_remat.passes.search.solver import Planner


class PlanPictures:
    """A `PictureSource` of the plans of one problem.  Each method computes its figures on the call.

    Args:
        problem: The problem that the plans solve.
        plain: The problem whose `reference` plain torch.compile saves; None if unknown: plans are compared with the fastest plan.
        observed: Observed memory of plain torch.compile; None if not observed: a plan that saves the same values is simulated.
        work_seconds: The limit of each search for the frontier, as for `Planner`.
        facts: Facts observed of the plan's own graphs; None if they were not lowered in this process.  Not part of `to_text`.
        link: The way to host memory, if plans may move tensors there.
    """

    def __init__(
        self,
        problem: Problem,
        plain: Problem | None = None,
        *,
        observed: PlainFacts | None = None,
        work_seconds: float | None = None,
        facts: RegionFacts | None = None,
        link: Link | None = None,
    ) -> None:
        self.problem, self.plain, self.observed = problem, plain, observed
        self.work_seconds, self.facts, self.link = work_seconds, facts, link

    def __deepcopy__(self, memo: dict[int, object]) -> PlanPictures:
        """Returns itself, so that converting a plan to a dictionary does not copy a whole problem."""
        return self

    def to_text(self) -> str:
        """Returns the arguments before `facts` as compressed text, which `StoredPictures` reads."""
        plain = None if self.plain is None else self.plain.to_json()
        observed = None if self.observed is None else asdict(self.observed)
        link = None if self.link is None else asdict(self.link)
        data = [self.problem.to_json(), plain, observed, self.work_seconds, link]
        return base64.b64encode(zlib.compress(json.dumps(data).encode(), level=3)).decode()

    def step(self, plan: Plan) -> StepFigures:
        """Live bytes over the step, beside the live bytes of plain torch.compile or of the fastest plan."""
        return figures_of_step(self._candidate(plan), (self.label, *self._other_levels()), plan.offloaded)

    def with_facts(self, facts: RegionFacts) -> PlanPictures:
        """Returns a copy with the facts observed of the plan's graphs."""
        return PlanPictures(
            self.problem,
            self.plain,
            observed=self.observed,
            work_seconds=self.work_seconds,
            facts=facts,
            link=self.link,
        )

    def nodes(self, plan: Plan) -> NodeTable:
        """Table of the bytes assumed and observed at each node; empty if nothing was observed."""
        return NodeTable() if self.facts is None else node_facts(self.problem, plan, self.facts)

    @property
    def label(self) -> str:
        """Name of the plan that other plans are compared with."""
        return FASTEST if self.plain is None else PLAIN

    def modules(self, plan: Plan) -> tuple[ModuleRow, ...]:
        """Rows of the saved and recomputed values of each module, in the order in which the model runs them."""
        return rows_of_modules(self._candidate(plan))

    def frontier(self, plan: Plan, points: int) -> tuple[FrontierPoint, ...]:
        """Points of the plans from the fastest to the lowest peak, and of `plan`, from a search at `points` budgets.

        If plans may move tensors to the host, the points of the plans that move nothing follow.
        """
        found = curves(self._planner, points)
        return marked(found.best, plan, found.kept if self.link is not None else ())

    def plans(self, points: int) -> list[Plan]:
        """The plans from the fastest to the lowest peak, from a search at `points` budgets."""
        return [replace(p, pictures=self) for p in curves(self._planner, points).best]

    @property
    def _planner(self) -> Planner:
        return Planner(self.problem, self.work_seconds, link=self.link)

    def _candidate(self, plan: Plan) -> Candidate:
        """Simulates the plan on the problem without tags, because the plan may have set tags aside."""
        return candidate_of(self.problem, plan.saved, plan.again)

    def _other_levels(self) -> tuple[Levels, Levels]:
        if self.plain is None:
            other = self._candidate(Planner(self.problem, self.work_seconds).fastest())
        elif self.observed is not None and self.observed.forward:
            return self.observed.forward, self.observed.backward
        else:
            problem = obeying(self.plain, LIKE_TORCH)
            saved = np.zeros(len(problem.values), dtype=bool)
            saved[list(problem.reference)] = True
            other = candidate(problem, saved, ())
        figures = figures_of_step(other)
        levels = tuple(zip(figures.columns, figures.live_bytes, strict=True))
        return levels[: figures.num_forward], levels[figures.num_forward :]


class StoredPictures:
    """A `PictureSource` that reads the text of `PlanPictures.to_text` at first use; ValueError then if the text is damaged."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __deepcopy__(self, memo: dict[int, object]) -> StoredPictures:
        return self

    def to_text(self) -> str:
        """Returns the text that this object reads."""
        return self.text

    @cached_property
    def _read(self) -> PlanPictures:
        try:
            problem, plain, observed, work_seconds, link = json.loads(zlib.decompress(base64.b64decode(self.text)))
            return PlanPictures(
                Problem.from_json(problem),
                None if plain is None else Problem.from_json(plain),
                observed=None if observed is None else json_values.read_as(PlainFacts, observed),
                work_seconds=work_seconds,
                link=None if link is None else Link(**link),
            )
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the graph of this plan cannot be read ({error})") from None

    def step(self, plan: Plan) -> StepFigures:
        """See `PlanPictures.step`."""
        return self._read.step(plan)

    def modules(self, plan: Plan) -> tuple[ModuleRow, ...]:
        """See `PlanPictures.modules`."""
        return self._read.modules(plan)

    def frontier(self, plan: Plan, points: int) -> tuple[FrontierPoint, ...]:
        """See `PlanPictures.frontier`."""
        return self._read.frontier(plan, points)

    def plans(self, points: int) -> list[Plan]:
        """See `PlanPictures.plans`."""
        return self._read.plans(points)


def marked(plans: Sequence[Plan], chosen: Plan | None, without: Sequence[Plan] = ()) -> tuple[FrontierPoint, ...]:
    """Points of the plans that no other plan beats in time and peak, and of the chosen plan, which is always kept.

    Args:
        without: Plans of a second curve, which move nothing to the host.
    """
    points = [FrontierPoint(p.peak_bytes, p.time_ns) for p in plans]
    points += [FrontierPoint(chosen.peak_bytes, chosen.time_ns, is_chosen=True)] if chosen is not None else []
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.time_ns, p.peak_bytes, not p.is_chosen)):
        if point.is_chosen or not kept or point.peak_bytes < min(p.peak_bytes for p in kept):
            kept.append(point)
    return (*kept, *(FrontierPoint(p.peak_bytes, p.time_ns, moves_nothing=True) for p in without))
