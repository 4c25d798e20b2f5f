"""Compiles one Dynamo graph with Inductor: plans and compiles again until the emitted code keeps the budget."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compile_remat._torch.autograd_node import written_inputs
from compile_remat._torch.dynamo.names import compiled_name
from compile_remat._torch.joint_graph import copied_graph
from compile_remat._torch.offload.copy_order import CopiesMisplaced
from compile_remat._torch.sizes import sizes_at
from compile_remat._util.collector import collector_paused
from compile_remat._util.size_range import Sizes
from compile_remat.announcement import announce
from compile_remat.compilation import report_cache
from compile_remat.compilation.caveats import caveats_of, unplanned, with_caveats
from compile_remat.compilation.feedback import (
    Emissions,
    settle,
    with_scheduled_peak,
    with_scheduled_range,
)
from compile_remat.compilation.plain_run import lowered_plain
from compile_remat.compilation.readings import PlanRefused, PlanTaken, Readings
from compile_remat.compilation.report_cache import Kept
from compile_remat.compilation.rounds import Rounds
from compile_remat.config import RematConfig
from compile_remat.cost_models import is_random
from compile_remat.errors import BudgetError, find_error, warn, without_traceback
from compile_remat.inductor.entry import (
    NO_CACHES,
    CustomPartitionerFn,
    compile_eager,
    compile_with_partitioner,
    without_partition_cache,
)
from compile_remat.inductor.light_code.graph_state import ProcessCounts
from compile_remat.inductor.observe import Observer
from compile_remat.inductor.suppressed_errors import unlogged
from compile_remat.inductor.unplanned_graphs import computes_gradients
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import Assumptions, PlainFacts, Status
from compile_remat.passes.graph.rewrites.called_regions import calls_regions, inlined_calls
from compile_remat.planning.deadline import DeadlineReached
from compile_remat.planning.request import FitBelow, Resume, target_bytes_of
from compile_remat.planning.settings import MOVES_NOTHING
from compile_remat.report import Report, record, recording, write
from compile_remat.verify.first_step import compile_checked

LOG = logging.getLogger("compile_remat")
Compiled = Callable[..., Any]

STRICT_OPTIONS = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
"""Turned on, the first option lets Inductor's wrapper keep a dead buffer for a later buffer of its size if Inductor's own estimate
of the peak, which is too high, seems to allow that: 3 MiB more than planned on a GPT at its floor.  The second option sorts
kernels anew by such an estimate: with blocks that run twice in one graph, the end of one pass moved into the other, which took
28.2 MiB instead of 26.5 (`python -m benchmarks.promise --model two_passes`, with and without it)."""

INNER_OPTIONS = {"reorder_for_locality": False}
"""Options for a graph that computes gradients itself.  By default, Inductor moves each node of an inference graph down to its first
reader.  A gradient's first reader is the end of the graph, so that all inputs of the gradients would live until then."""

_REGIONS = itertools.count(1)


class Compilation:
    """A Dynamo graph with the settings that it is compiled under.

    Args:
        gm: The graph.
        example_inputs: Arguments of the first call.
        patches: Inductor's options, as the user gave them.
        region, plain, name: Attributes of the compilation before, if the graph is compiled again.

    Attributes:
        region: The number of the graph in reports.
        name: The name of the graph in reports, see `compiled_name`.
        written: Positions of the inputs that the graph writes into, set once the graph is compiled; None if unknown.
        plain: Facts of the graph under plain torch.compile, by sizes; None for sizes at which the graph could not be lowered.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        config: RematConfig,
        patches: Mapping[str, Any],
        region: int | None = None,
        plain: dict[Sizes, PlainFacts | None] | None = None,
        name: str | None = None,
    ) -> None:
        self.gm, self.example_inputs = gm, example_inputs
        self.config, self.patches = config, patches
        self.region = next(_REGIONS) if region is None else region
        self.name = compiled_name(gm.graph) if name is None else name
        self.written: frozenset[int] | None = None
        self.plain = {} if plain is None else plain

    def run(self, partitioner: RematPartitioner, *, is_trial: bool = False) -> tuple[Compiled, list[Report]]:
        """Compile inside the partitioner's budget; returns the compiled function, and the reports, which are recorded as well.

        A plan whose code misplaces a copy of offload is replaced by one that moves nothing, with a warning.

        Args:
            is_trial: True to write no report to `report_dir` yet.

        Raises:
            BudgetError: No plan fits, or the code of the lowest one does not.
        """
        before = ProcessCounts()
        try:
            return self._run(partitioner, is_trial=is_trial)
        except Exception as error:
            found = find_error(error, CopiesMisplaced)
            if found is None:
                raise
        before.put_back()
        warn(f"{MOVES_NOTHING}in the code that Inductor makes for the plan, {found}. Please report this")
        settings = replace(partitioner.settings, link=None, moves_nothing=True)
        return self._run(replace(partitioner, settings=settings), is_trial=is_trial)

    def _run(self, partitioner: RematPartitioner, *, is_trial: bool) -> tuple[Compiled, list[Report]]:
        with recording(inlined_calls=inlined_calls(self.gm), module=self.name) as reports:
            if self.config.check or self._is_final(partitioner):
                partitioner = self._with_plain(partitioner)
            if self.config.check:
                enter = self._enter_with(partitioner)
                folder = self.config.report_dir
                compiled = compile_checked(self.gm, partitioner, enter, folder)
            elif self._is_final(partitioner):
                side_file = self._side_file(partitioner)  # before Inductor rewrites the graph
                emissions = Emissions() if self.config.compiler == "inductor" else None
                compiled, partitioner = self._enter(partitioner, emissions)
                if emissions is not None:
                    reports[:] = [_as_emitted(report) for report in with_scheduled_peak(reports, emissions)]
                if not reports and partitioner.guarded and self.config.compiler == "eager":
                    reports.append(self._unplanned(partitioner, None))
                self._keep(None if isinstance(partitioner.request, Resume) else side_file, reports)
            else:
                compiled = self._enter_within(partitioner)
            if partitioner.guarded:
                caveats = caveats_of(self.gm, self.patches, self.config.compiler)
                reports[:] = [with_caveats(report, caveats) for report in reports]
            reports[:] = [replace(report, region=self.region, module=self.name) for report in reports]
        if not is_trial:
            self.write(reports)
        return compiled, reports

    def _is_final(self, partitioner: RematPartitioner) -> bool:
        """Returns whether the first plan is taken as it is: there is no Inductor code, no limit, or a target that is no limit."""
        is_below = isinstance(partitioner.request, FitBelow)
        return self.config.compiler == "eager" or not partitioner.guarded or is_below

    def _enter(
        self,
        partitioner: RematPartitioner,
        observer: Observer | None = None,
        rounds: Rounds | None = None,
        *,
        stops: bool = False,
    ) -> tuple[Compiled, RematPartitioner]:
        """Compile; if a deadline ends the planning, compile the incumbent without AOTAutograd's cache.

        Returns the compiled function, and the partitioner that made its plan.
        """
        enter = self._enter_with(partitioner)
        try:
            with recording() as reports:  # reports of an interrupted attempt are dropped
                return _entered(enter, partitioner, observer, _judged(rounds, reports, partitioner, stops)), partitioner
        except Exception as error:
            found = find_error(error, DeadlineReached)
            if found is None:
                raise
            resume = found.resume
        partitioner = replace(partitioner, request=resume)
        with without_partition_cache(), recording() as reports:
            return _entered(enter, partitioner, observer, _judged(rounds, reports, partitioner, stops)), partitioner

    def _enter_with(self, guide: RematPartitioner) -> Callable[..., Compiled]:
        """Returns ``enter(partitioner, observer, before_code)``, which compiles under the options that `guide` needs."""
        options = self._options(guide)

        def enter(
            chosen: CustomPartitionerFn, observer: Observer | None = None, before_code: Observer | None = None
        ) -> Compiled:
            rewrite = {"rewrite": chosen.with_copies} if isinstance(chosen, RematPartitioner) else {}
            if self.config.compiler == "eager":
                return compile_eager(self.gm, self.example_inputs, chosen, **rewrite)
            return compile_with_partitioner(
                self.gm,
                self.example_inputs,
                chosen,
                options,
                guarded=guide.guarded,
                fuses_more=not guide.asks_for_lowest,  # else facts would tell of fusions, not of plans
                observer=observer,
                before_code=before_code,
                is_ordered=draws_in_turn,
                **rewrite,
            )

        return enter

    def _options(self, partitioner: RematPartitioner) -> dict[str, Any]:
        # With nested regions Inductor's reuse of buffers is wrong by itself; see `calls_regions`.
        strict = partitioner.guarded or calls_regions(self.gm)
        inner = partitioner.guarded and computes_gradients(self.gm)
        return {
            **(STRICT_OPTIONS if strict else {}),
            **(INNER_OPTIONS if inner else {}),
            **self.patches,
            **({} if partitioner.settings.can_be_cached else NO_CACHES),
        }

    def _side_file(self, partitioner: RematPartitioner) -> Path | None:
        if self.config.compiler == "eager" or self.config.check:  # a check takes nothing from a cache
            return None
        if isinstance(partitioner.request, Resume) or not partitioner.settings.can_be_cached:
            return None
        return report_cache.path_of(lambda: self._text, partitioner.uuid(), self._options(partitioner))

    @cached_property
    def _text(self) -> str | None:
        """Text of the graph as Dynamo made it, which another process also has; Inductor rewrites the graph in the first round."""
        return report_cache.text_of(self.gm, self.example_inputs)

    def write(self, reports: Sequence[Report]) -> None:
        """Write the reports to `report_dir`, where that is set."""
        if self.config.report_dir is not None:
            for report in reports:
                write(report, self.config.report_dir)

    def _keep(self, side_file: Path | None, reports: Sequence[Report]) -> None:
        """Store the reports; if torch's cache had the graphs, so that nothing was planned, record the stored reports instead."""
        self.written = written_inputs(len(self.example_inputs))
        if side_file is None:
            return
        if reports:
            written = None if self.written is None else tuple(sorted(self.written))
            report_cache.store(side_file, Kept(tuple(reports), written=written))
            return
        kept = report_cache.recall(side_file)
        self.written = None if kept.written is None else frozenset(kept.written)
        for report in kept.reports:
            announce(record(report))
            if report.message and report.status != Status.FALLBACK.name:  # a failed planner has warned just now
                warn(report.message)

    def _unplanned(self, partitioner: RematPartitioner, peak_bytes: int | None) -> Report:
        report = unplanned(self.gm, partitioner.settings.budget, peak_bytes)
        if report.message:
            warn(report.message)
        return report

    # -- inside a budget ----------------------------------------------------------------------------------------------

    def _enter_within(self, partitioner: RematPartitioner) -> Compiled:
        """Plan, have the graphs lowered and read, and plan again until a plan is taken; then make its code.

        C++ kernels are built once the peak of the emitted code was compared with the budget as well.

        Raises:
            BudgetError: The lowest observed plan needs more than the budget.
        """
        first = self._side_file(partitioner)
        rounds = self._found_before(partitioner, first)
        first = None if rounds.is_settled else first
        try:
            while True:
                before = ProcessCounts()
                try:
                    return self._round(rounds, first)
                except Exception as error:
                    self._go_on(rounds, error)
                    before.put_back()
        finally:
            rounds.searches.clear()

    def lowered(self, partitioner: RematPartitioner) -> Rounds:
        """The rounds up to the plan that `run` would take; graphs are lowered and read, and no code is made.

        Raises:
            BudgetError: The lowest observed plan needs more than the budget.
        """
        rounds = Rounds(self._with_plain(partitioner, is_asked=True))
        while True:
            before = ProcessCounts()
            try:
                with recording():
                    self._enter(rounds.partitioner, Emissions(), rounds, stops=True)
            except Exception as error:
                before.put_back()
                if find_error(error, PlanTaken) is None:
                    self._go_on(rounds, error)
                    continue
            return rounds

    def _go_on(self, rounds: Rounds, error: Exception) -> None:
        """Prepare another round after a `PlanRefused` or a `BudgetError`; any other error is raised again."""
        if find_error(error, PlanRefused) is not None:
            return
        found = find_error(error, BudgetError)
        if found is None:
            raise error
        rounds.failed(without_traceback(found))

    def _with_plain(self, partitioner: RematPartitioner, *, is_asked: bool = False) -> RematPartitioner:
        """The partitioner with the facts of plain torch.compile, if the budget is a fraction of the plain peak or `is_asked`."""
        wanted = is_asked or partitioner.settings.asks_for_plain(self.gm)
        if not wanted or self.config.compiler == "eager" or partitioner.fallback or not self._has_backward:
            return partitioner
        sizes = partitioner.sizes
        if sizes not in self.plain:
            self.plain[sizes] = lowered_plain(copied_graph(self.gm), self.example_inputs, self.patches, sizes)
        return replace(partitioner, assumed=replace(partitioner.assumed, plain=self.plain[sizes]))

    @property
    def _has_backward(self) -> bool:
        has_leaf = any(isinstance(x, torch.Tensor) and x.requires_grad for x in self.example_inputs)
        return has_leaf or computes_gradients(self.gm)

    def _found_before(self, partitioner: RematPartitioner, side_file: Path | None) -> Rounds:
        """The rounds from the plan that an earlier process took, or from the beginning."""
        kept = Kept() if side_file is None else report_cache.recall(side_file)
        if kept.next_bytes is None:
            return Rounds(self._with_plain(partitioner))
        request = FitBelow(kept.next_bytes) if kept.next_bytes else partitioner.request
        assumed = Assumptions.from_text(kept.next_assumed)
        return Rounds(replace(partitioner, request=request, assumed=assumed), is_settled=True)

    def _round(self, rounds: Rounds, first: Path | None) -> Compiled:
        """Compile one plan.

        Args:
            first: The side file of the first plan, in which the plan that is taken is stored.

        Raises:
            PlanRefused: The plan is not taken.
        """
        with recording() as reports:
            emissions, side_file = (
                Emissions(),
                self._side_file(rounds.partitioner),
            )  # before Inductor rewrites the graph
            compiled, partitioner = self._enter(rounds.partitioner, emissions, rounds)
            side_file = None if isinstance(partitioner.request, Resume) else side_file
            with sizes_at(partitioner.sizes):
                reports[:] = with_scheduled_peak(reports, emissions)
                if not reports and emissions.seen:
                    run = emissions.region_run()
                    reports.append(self._unplanned(partitioner, None if run is None else run.peak_bytes))
            rounds.judge_code(reports)
            reports[:] = settle(reports, partitioner.settings, partitioner.request)
            reports[:] = [rounds.concluded(report) for report in reports]
            if partitioner.settings.budget.kind == "bytes":
                reports[:] = with_scheduled_range(reports, emissions)
            self._keep(side_file, reports)
            if first is not None and side_file is not None and side_file != first:
                target_bytes = target_bytes_of(partitioner.request) or 0
                report_cache.store(first, Kept((), target_bytes, partitioner.assumed.to_text()))
            return compiled


def _as_emitted(report: Report) -> Report:
    """The report of a plan that was not judged, with the peak of its code as the observed peak."""
    return replace(report, observed_peak_bytes=report.scheduled_peak_bytes)


def _entered(
    enter: Callable[..., Compiled], partitioner: RematPartitioner, observer: Observer | None, readings: Readings | None
) -> Compiled:
    """Compile; raises the exception by which `readings` left Inductor, even if torch has suppressed this exception."""
    with collector_paused(), unlogged(PlanRefused, PlanTaken, BudgetError):
        compiled = enter(partitioner, observer, readings)
    if readings is not None and readings.left is not None:
        raise readings.left
    return compiled


def _judged(
    rounds: Rounds | None, reports: Sequence[Report], partitioner: RematPartitioner, stops: bool
) -> Readings | None:
    """The readings by which `rounds` judge the plan in `reports`, at the sizes of the plan; None without rounds."""
    if rounds is None:
        return None
    return Readings(lambda run: rounds.judge(reports, run), partitioner.sizes, stops=stops)


def draws_in_turn(graph: fx.GraphModule) -> bool:
    """Returns whether several operators draw from a generator: their order decides which numbers each operator gets.

    Inductor's own kernels share one draw of seeds; Inductor calls `multinomial`, say, and all operators under `fallback_random`.
    """
    return sum(map(is_random, graph.graph.nodes)) > 1
