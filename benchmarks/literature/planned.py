"""Our plans beside a published point: what both kinds of problems, traced and torch-free, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.literature.rows import FrontierRow, PointRow
from compile_remat.passes import Plan, Planner, Problem, frontier

BUDGETS = 40
"""Number of budgets between the lowest peak and the fastest plan's: the resolution of "ours at its time"."""


@dataclass(frozen=True)
class Point:
    """A published point: bytes in the source's count, and time over its baseline, None where no figure was found."""

    setting: str
    nbytes: int
    extra: float | None
    remark: str = ""


@dataclass(frozen=True)
class Network:
    """Facts about one network of a source, known before planning.

    Attributes:
        fixed_bytes: Bytes that the source counts beside the region peak; below zero if the source leaves out some of that peak.
        unit: Unit of bytes in the pictures.
    """

    source: str
    name: str
    device: str
    baseline_bytes: int
    eager_bytes: int | None = None
    fixed_bytes: int = 0
    unit: str = "GiB"


class Planned:
    """Plans of one problem, for several points."""

    def __init__(self, network: Network, problem: Problem, budgets: int = BUDGETS) -> None:
        self.network, self.planner = network, Planner(problem)
        self.fastest = self.planner.fastest()
        self.plans = [*frontier(self.planner, budgets), self.fastest, self.planner.lowest()]

    def rows(self, points: Sequence[Point]) -> list[PointRow]:
        """One for each point."""
        network, fixed = self.network, self.network.fixed_bytes
        within = [self.planner.within(point.nbytes - fixed) for point in points]
        self.plans += within
        lowest = min(plan.peak_bytes for plan in self.plans)
        rows = []
        for point, plan in zip(points, within, strict=True):
            extra, bound = (time_ns / max(1, plan.step_time_ns) for time_ns in (plan.extra_time_ns, plan.bound_time_ns))
            has_time = point.extra is not None and point.extra >= 0
            rows.append(
                PointRow(
                    network.source,
                    network.name,
                    point.setting,
                    network.device,
                    network.baseline_bytes,
                    point.nbytes,
                    point.extra,
                    network.eager_bytes,
                    self.fastest.peak_bytes + fixed,
                    lowest + fixed,
                    extra if plan.is_feasible else None,
                    bound if plan.is_feasible else None,
                    lowest_within_time(self.plans, point.extra or 0.0) + fixed if has_time else None,
                    point.remark,
                )
            )
        return rows

    def frontier_row(
        self, published: Sequence[Point] = (), policies: dict[str, list[list[float]]] | None = None
    ) -> FrontierRow:
        """A picture's frontier: all plans that no other plan beats in both peak and time."""
        fixed = self.network.fixed_bytes
        ordered = sorted((p for p in self.plans if p.is_feasible), key=lambda p: (p.peak_bytes, p.extra_time_ns))
        points: list[list[float]] = []
        for plan in ordered:
            share = plan.extra_time_ns / max(1, plan.step_time_ns)
            if not points or share < points[-1][1]:
                points.append([plan.peak_bytes + fixed, share])
        theirs = [[float(p.nbytes), p.extra] for p in published if p.extra is not None]
        return FrontierRow(
            self.network.source, self.network.name, self.network.unit, points, theirs, dict(policies or {})
        )


def lowest_within_time(plans: Sequence[Plan], extra: float) -> int:
    """The lowest peak of the plans that take no more than `extra` of the step."""
    return min(
        plan.peak_bytes for plan in plans if plan.is_feasible and plan.extra_time_ns <= extra * plan.step_time_ns
    )
