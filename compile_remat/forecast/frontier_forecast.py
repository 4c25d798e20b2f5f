"""Plans of a step from the fastest to the one of lowest peak, each lowered for the device if that is possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from compile_remat._util.progress import Advance
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import trace
from compile_remat.forecast.lowering.elsewhere import Lowering, lowered_for
from compile_remat.forecast.lowering.observing import (
    Asked,
    NotObserved,
    Observed,
    Outcome,
    facts_text,
    with_attention_of,
)
from compile_remat.forecast.target_step import Target, ready_on
from compile_remat.passes import Plan, Planner, curves, plain_time_ns


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier.

    Attributes:
        observed_peak_bytes: The plan's region peak as read from its lowered graphs; None for an estimate.
    """

    plan: Plan
    observed_peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The region peak: the observed one, else the estimated one."""
        return self.observed_peak_bytes or self.plan.peak_bytes


@dataclass(frozen=True)
class FrontierForecast:
    """Plans from the fastest to the one of lowest peak.

    Attributes:
        why: Reason why the plans are estimates; empty if each was lowered and read.
        kept: The plans that move nothing to the host, as estimates.
    """

    points: tuple[FrontierPoint, ...]
    why: str = ""
    kept: tuple[Plan, ...] = ()

    @property
    def facts(self) -> str:
        """Origin of the plans' bytes: `observed` in their lowered graphs, or `estimated` by rules."""
        return "estimated" if self.why else "observed"

    @property
    def facts_text(self) -> str:
        """`facts` as a line of text, with the reason for an estimate."""
        return facts_text(self.why)


def forecast_frontier(
    builder: Builder, target: Target, points: int, advance: Advance = lambda text="", count=1: None
) -> FrontierForecast:
    """Returns the frontier of a step for `points` budgets; each plan takes a lowering of its own.

    Args:
        advance: Called with a text at the start of each part of the work.

    Raises:
        RematError: A setting is invalid, or the model cannot be traced.
    """
    with lowered_for(target) as lowering:
        lowering.begin(Asked(builder, target, MemoryBudget("min")))
        advance(f"tracing {builder.name}")
        ready = ready_on(trace(builder, target.figures()), target)
        if lowering.is_there:
            advance("waiting for the lowest plan to be lowered")
        lowest = with_attention_of(lowering.result(), ready.problem)
        if isinstance(lowest, Observed):
            found = _observed(builder, target, lowering, lowest, points, advance)
        else:
            advance("searching for the frontier")
            both = curves(ready.planner, points)
            found = _estimated(both.best, both.kept, str(lowest))
    plain_ns = plain_time_ns(ready.with_torch)
    timed = (replace(point, plan=replace(point.plan, plain_time_ns=plain_ns)) for point in found.points)
    return replace(found, points=tuple(timed))


def _observed(
    builder: Builder, target: Target, lowering: Lowering, lowest: Observed, points: int, advance: Advance
) -> FrontierForecast:
    """Returns the frontier of the problem that has the facts of the lowest plan, with each of its plans lowered."""
    advance("searching for the frontier")
    found = curves(Planner(lowest.problem, target.time_limit, link=target.link), points)
    plans = found.best
    seen = [_point(lowest)]
    for k, plan in enumerate(reversed(plans[:-1])):
        advance(f"lowering plan {k + 2} of {len(plans)}")
        lowering.begin(Asked(builder, target, MemoryBudget("bytes", plan.peak_bytes)))
        outcome: Outcome = lowering.result()
        if isinstance(outcome, NotObserved):
            return _estimated(plans, found.kept, str(outcome))
        if not isinstance(outcome, BudgetError):  # after an error no lowered plan keeps these bytes: no point
            seen.append(_point(outcome))
    return FrontierForecast(tuple(_best(seen)), kept=tuple(found.kept))


def _estimated(plans: Iterable[Plan], kept: Iterable[Plan], why: str) -> FrontierForecast:
    return FrontierForecast(tuple(map(FrontierPoint, plans)), why, tuple(kept))


def _point(observed: Observed) -> FrontierPoint:
    assert observed.report.plan is not None
    return FrontierPoint(observed.report.plan, observed.peak_bytes)


def _best(points: list[FrontierPoint]) -> Iterator[FrontierPoint]:
    """Yields the points that are faster than all points of lower peak, the fastest first."""
    lowest_bytes = None
    for point in sorted(points, key=lambda point: (point.plan.time_ns, point.peak_bytes)):
        if lowest_bytes is None or point.peak_bytes < lowest_bytes:
            lowest_bytes = point.peak_bytes
            yield point
