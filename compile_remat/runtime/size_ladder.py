"""Keeps the budget at every size: the hook that gives each call of a region a plan whose box of sizes contains the call's sizes.

A plan keeps its budget up to the sizes of its `SizeRange`.  For a call outside of all boxes, a plan for a larger size class is
compiled, up to `RUNGS` plans for one graph.  The sizes of the classes form a geometric grid up to the largest sizes at which any
plan can keep the budget, so that a batch that grows by one does not compile at each step.  A call that lies in several boxes runs
the fastest of their plans.

If no plan keeps a budget in bytes, the planner's `BudgetError` is raised before the step runs.  A region that shares its budget
is planned as in a first step: beside the bytes that the calls in flight hold.  The joint allocation then has its menu at these
sizes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compile_remat._torch.ambient import compiling_as_dynamo_does
from compile_remat._util.size_range import Sizes
from compile_remat.errors import BudgetError, RematError, find_error, warn, without_traceback
from compile_remat.planning.request import Fit, SharedOption
from compile_remat.runtime.refusals import Refusals
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.states import PlanState

LOG = logging.getLogger("compile_remat")

RUNGS = 8
"""Plans of one graph for size classes, at most; the last plan is made for the largest sizes seen."""

STEP = 1.25
"""The largest size of a class is at least this factor beyond that of the class before."""


@dataclass(frozen=True)
class Rung:
    """A plan and the largest sizes at which it may run, in the order of the hook's positions."""

    running: RunningPlan
    upper: tuple[int, ...]

    def serves(self, sizes: Sequence[int]) -> bool:
        return all(map(int.__le__, sizes, self.upper))


class SizeLadder(Hook):
    """Chooses the plan of each call by its sizes.

    Args:
        positions: The graph's symbols by name, each with its position among the arguments.
        running: The first plan, whose report has a range.
        beside: Returns the request for a call of a region that shares its budget; None for a region without peers.
    """

    def __init__(
        self,
        positions: Sequence[tuple[str, int]],
        running: RunningPlan,
        beside: Callable[[CallInFlight], SharedOption] | None = None,
    ) -> None:
        self.beside = beside
        planned = running.report.size_range
        assert planned is not None
        varying = [(name, k) for name, k in positions if name in planned.names]
        self.names = tuple(name for name, _ in varying)
        self.positions = tuple(k for _, k in varying)
        self.rungs = [self._rung(running)]
        self.num_plans = 1
        self.largest = self.rungs[0].upper
        self.refusals = Refusals()
        self.has_warned = False
        self.is_closed = False  # no more plans are made: one failed to compile, or there are `RUNGS`
        self._lock = threading.RLock()

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """Make the region run a plan whose box contains the sizes of this call.

        Raises:
            BudgetError: No plan keeps the budget at these sizes.
        """
        sizes = [args[k] for k in self.positions]
        region = call.region
        assert region is not None
        running = self._known(region, sizes)
        if running is None:
            with compiling_as_dynamo_does(), self._lock:  # in this order: see `compiling_as_dynamo_does`
                running = self._known(region, sizes) or self._extended(call, region, tuple(sizes))
        if running is not region.running:
            region.run_under(running)
        call.running = running

    def _known(self, region: CompiledRegion, sizes: Sequence[int]) -> RunningPlan | None:
        """Returns the fastest plan that exists for these sizes; None if there is none."""
        running = region.running  # read before the rungs: another thread adds a plan to them before it runs
        if all(rung.running is not running for rung in self.rungs):  # another hook has changed the plan
            self.rungs = [self._rung(running)]
        return next((rung.running for rung in self.rungs if rung.serves(sizes)), None)

    def _extended(self, call: CallInFlight, region: CompiledRegion, sizes: tuple[int, ...]) -> RunningPlan:
        """Returns a plan for sizes that no rung serves: a new plan, or the lowest existing one if none can be made.

        Raises:
            BudgetError: No plan keeps the budget at these sizes.
        """
        request = self._request(call, region)
        if request is None or self.is_closed:
            return self._unplanned(region, sizes)
        self.refusals.check(request, self._named(sizes))
        failure: BudgetError | None = None
        for target in dict.fromkeys(self._targets(sizes, request)):
            asked = request
            if isinstance(request, SharedOption) and request.others_bytes and target == sizes:  # the last resort
                asked = replace(request, may_miss=True)
            try:
                found = self._compiled(region, asked, target)
            except BudgetError as error:
                failure = error
                continue
            self.num_plans += 1
            self.is_closed = found is None or self.num_plans >= RUNGS
            return self._unplanned(region, sizes) if found is None else self._taken(region, found, target)
        assert failure is not None, "there is a target"
        self.refusals.add(request, self._named(sizes), failure)
        raise without_traceback(failure) from None

    def _request(self, call: CallInFlight, region: CompiledRegion) -> Fit | SharedOption | None:
        """Returns the request for a plan at larger sizes; None if the plan may no longer change."""
        if region.state is PlanState.EXCLUSIVE:
            return Fit()
        may_change = region.state in (PlanState.EXPECTING, PlanState.OFFERING, PlanState.SHARED)
        return self.beside(call) if self.beside is not None and may_change else None

    def _compiled(
        self, region: CompiledRegion, request: Fit | SharedOption, sizes: tuple[int, ...]
    ) -> RunningPlan | None:
        """Returns a plan for these sizes; None if it does not compile.

        Raises:
            BudgetError: No plan keeps the budget at these sizes.
        """
        try:
            return region.recompile(request, self._named(sizes))
        except Exception as error:  # any error of a compiler: the region keeps its plan
            ours = find_error(error, RematError)
            if ours is not None:
                raise ours from None
            LOG.warning("a plan for larger sizes does not compile", exc_info=True)
            return None

    def _targets(self, sizes: tuple[int, ...], request: Fit | SharedOption) -> Iterator[tuple[int, ...]]:
        """Yields the largest sizes of the classes to try, the widest class first; only `sizes` if smaller ones were refused."""
        if any(all(map(int.__ge__, sizes, refused)) for refused in self.refusals.sizes_of(request)):
            yield sizes
            return
        carried = tuple(map(max, *[self._box(rung.running, "carried") for rung in self.rungs], (0,) * len(sizes)))
        if self.num_plans == RUNGS - 1:
            yield tuple(map(max, self.largest, sizes, carried))
        elif len(sizes) > 1 or not carried[0]:
            yield tuple(int(STEP * n) for n in sizes)
        else:
            last = max(rung.upper[0] for rung in self.rungs)
            step = max(STEP, (carried[0] / last) ** (1 / (RUNGS - self.num_plans)))
            yield (max(sizes[0], min(carried[0], int(last * step))),)
        yield sizes

    def _taken(self, region: CompiledRegion, found: RunningPlan, target: tuple[int, ...]) -> RunningPlan:
        """Add a new plan, order all plans by speed, and report it; under a shared budget it replaces plans for smaller sizes."""
        self.largest = tuple(map(max, self.largest, target))
        kept = [] if found.report.offers else self.rungs
        if found.report.offers:
            region.forget_plans()
        rungs = [*kept, self._rung(found, target)]
        self.rungs = sorted(rungs, key=lambda rung: rung.running.plan.extra_time_ns / rung.running.plan.once_time_ns)
        region.publish(found.report, replaces=bool(found.report.offers))
        LOG.info("a plan for larger sizes:\n%s", found.report)
        return found

    def _unplanned(self, region: CompiledRegion, sizes: tuple[int, ...]) -> RunningPlan:
        """Returns the slowest plan, usually the lowest, for sizes at which it may exceed the budget; warns once."""
        if not self.has_warned:
            self.has_warned = True
            shown = ", ".join(f"{name} = {size}" for name, size in self._named(sizes))
            warn(
                f"a graph is called with larger sizes ({shown}) than it is planned for ({region.running.report.size_range}); "
                "no other plan can be made for them, and the step may exceed memory_budget"
            )
        return self.rungs[-1].running

    def _named(self, sizes: Sequence[int]) -> Sizes:
        return tuple(zip(self.names, sizes, strict=True))

    def _rung(self, running: RunningPlan, least: Sequence[int] = ()) -> Rung:
        """Returns a rung up to the largest sizes of the plan's own range, and at least up to the sizes `least`."""
        upper = self._box(running, "upper")
        return Rung(running, tuple(map(max, upper, least)) if least else upper)

    def _box(self, running: RunningPlan, box: str) -> tuple[int, ...]:
        """Returns a box of the plan's range (`upper` or `carried`), in the order of the positions; all 0 if it has no range."""
        found = running.report.size_range
        named = {} if found is None else dict(zip(found.names, getattr(found, box), strict=False))
        return tuple(named.get(name, 0) for name in self.names)
