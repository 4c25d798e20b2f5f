"""One Dynamo graph through Inductor: planned and compiled again until the emitted code keeps the budget."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from compile_remat._torch.autograd_node import written_inputs
from compile_remat._torch.sizes import sizes_at
from compile_remat.announcement import announce
from compile_remat.compilation import report_cache
from compile_remat.compilation.caveats import caveats_of, unplanned, with_caveats
from compile_remat.compilation.feedback import (
    Emissions,
    bytes_to_plan_for,
    settle,
    with_scheduled_peak,
    with_scheduled_range,
)
from compile_remat.compilation.report_cache import Kept
from compile_remat.config import RematConfig
from compile_remat.cost_models import is_random
from compile_remat.errors import find_error, warn
from compile_remat.inductor.called_regions import calls_regions, inlined_calls
from compile_remat.inductor.cpp_kernels.building import build, building_postponed
from compile_remat.inductor.entry import (
    CustomPartitionerFn,
    compile_eager,
    compile_with_partitioner,
    without_partition_cache,
)
from compile_remat.inductor.observe import Observer
from compile_remat.inductor.unplanned_graphs import computes_gradients
from compile_remat.passes import Status
from compile_remat.planning.deadline import DeadlineReached
from compile_remat.planning.partitioner import RematPartitioner
from compile_remat.planning.request import FitBelow, Resume
from compile_remat.report import Report, record, recording, write
from compile_remat.verify.first_step import compile_checked

LOG = logging.getLogger("compile_remat")
Compiled = Callable[..., Any]

STRICT_OPTIONS = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
"""With the first, Inductor's wrapper keeps a dead buffer for a later one of its size where its own estimate of the peak, which is
too high, seems to allow it: 3 MiB more than planned on a GPT at its floor.  With the second, it sorts kernels anew by such an
estimate: with blocks that run twice in one graph, the end of one pass came to stand in the other, 28.2 MiB instead of 26.5
(`python -m benchmarks.promise --model two_passes`, with and without it)."""

INNER_OPTIONS = {"reorder_for_locality": False}
"""Of a graph that computes gradients itself: for inference, Inductor moves each node down to its first reader, which for a
gradient is the end of the graph, so that all that the gradients are computed from lives until then."""

_REGIONS = itertools.count(1)

TIGHTENINGS = 2
"""The maximum number of times that a graph is planned and compiled again because its code needs more than the budget."""


class Compilation:
    """A Dynamo graph with the settings that it is compiled under.

    Args:
        gm: The graph.
        example_inputs: What it will be called with first.
        patches: Inductor's options, as the user gave them.
        region: Of the compilation before, where the graph is compiled again.

    Attributes:
        region: The number of the graph in reports.
        written: Positions of the inputs that the graph writes into, once it is compiled; None where they are not known.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        config: RematConfig,
        patches: Mapping[str, Any],
        region: int | None = None,
    ) -> None:
        self.gm, self.example_inputs = gm, example_inputs
        self.config, self.patches = config, patches
        self.region = next(_REGIONS) if region is None else region
        self.written: frozenset[int] | None = None

    def run(self, partitioner: RematPartitioner, *, is_trial: bool = False) -> tuple[Compiled, list[Report]]:
        """Compile inside the partitioner's budget; returns what to call, and the reports, which are recorded as well.

        Args:
            is_trial: No report is written to `report_dir` yet.

        Raises:
            BudgetError: No plan fits, or the code of the lowest one does not.
        """
        with recording(inlined_calls=inlined_calls(self.gm)) as reports:
            if self.config.check:
                enter = self._enter_with(partitioner)
                folder = self.config.report_dir
                compiled = compile_checked(self.gm, partitioner, enter, folder)
            elif self._is_final(partitioner):
                side_file = self._side_file(partitioner)  # Inductor rewrites the graph that names it
                compiled, partitioner = self._enter(partitioner)
                if not reports and partitioner.guarded and self.config.compiler == "eager":
                    reports.append(self._unplanned(partitioner, None))
                self._keep(None if isinstance(partitioner.request, Resume) else side_file, reports)
            else:
                compiled = self._enter_within(partitioner)
            if partitioner.guarded:
                caveats = caveats_of(self.gm, self.patches, self.config.compiler)
                reports[:] = [with_caveats(report, caveats) for report in reports]
            reports[:] = [replace(report, region=self.region) for report in reports]
        if not is_trial:
            self.write(reports)
        return compiled, reports

    def _is_final(self, partitioner: RematPartitioner) -> bool:
        """Whether the first plan is taken as it is: without emitted code or a limit, or below a target that is no limit."""
        is_below = isinstance(partitioner.request, FitBelow)
        return self.config.compiler == "eager" or not partitioner.guarded or is_below

    def _enter(
        self, partitioner: RematPartitioner, observer: Observer | None = None
    ) -> tuple[Compiled, RematPartitioner]:
        """Compile; where a deadline ends the planning, compile the incumbent past torch's caches.

        Returns what to call, and the partitioner whose plan that is.
        """
        enter = self._enter_with(partitioner)
        try:
            with recording():  # the reports of an interrupted attempt are dropped
                return enter(partitioner, observer), partitioner
        except Exception as error:
            found = find_error(error, DeadlineReached)
            if found is None:
                raise
            resume = found.resume
        partitioner = replace(partitioner, request=resume)
        with without_partition_cache():
            return enter(partitioner, observer), partitioner

    def _enter_with(self, guide: RematPartitioner) -> Callable[..., Compiled]:
        """``enter(partitioner, observer)`` under the options that go with `guide`."""
        options = self._options(guide)

        def enter(chosen: CustomPartitionerFn, observer: Observer | None = None) -> Compiled:
            rewrite = {"rewrite": chosen.with_copies} if isinstance(chosen, RematPartitioner) else {}
            if self.config.compiler == "eager":
                return compile_eager(self.gm, self.example_inputs, chosen, **rewrite)
            return compile_with_partitioner(
                self.gm,
                self.example_inputs,
                chosen,
                options,
                guarded=guide.guarded,
                observer=observer,
                is_ordered=draws_in_turn,
                **rewrite,
            )

        return enter

    def _options(self, partitioner: RematPartitioner) -> dict[str, Any]:
        # With nested regions Inductor's reuse of buffers is wrong by itself; see `called_regions.calls_regions`.
        strict = partitioner.guarded or calls_regions(self.gm)
        inner = partitioner.guarded and computes_gradients(self.gm)
        return {
            **(STRICT_OPTIONS if strict else {}),
            **(INNER_OPTIONS if inner else {}),
            **self.patches,
        }

    def _side_file(self, partitioner: RematPartitioner) -> Path | None:
        if self.config.compiler == "eager" or self.config.check:  # a check takes nothing from a cache
            return None
        if isinstance(partitioner.request, Resume):
            return None
        return report_cache.path_of(self.gm, self.example_inputs, partitioner.uuid(), self._options(partitioner))

    def write(self, reports: Sequence[Report]) -> None:
        """Write the reports to `report_dir`, where that is set."""
        if self.config.report_dir is not None:
            for report in reports:
                write(report, self.config.report_dir)

    def _keep(self, side_file: Path | None, reports: Sequence[Report]) -> None:
        """Store what was planned; where torch's cache had the graphs, so that nothing was, take up what was stored then."""
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
            record(report)
            announce(report)
            if report.message and report.status != Status.FALLBACK.name:  # of a failed planner we warned just now
                warn(report.message)

    def _unplanned(self, partitioner: RematPartitioner, peak_bytes: int | None) -> Report:
        report = unplanned(self.gm, partitioner.settings.budget, peak_bytes)
        if report.message:
            warn(report.message)
        return report

    # -- inside a budget ----------------------------------------------------------------------------------------------

    def _enter_within(self, partitioner: RematPartitioner) -> Compiled:
        """Compile, compare the peak of the final code with the budget; where it is above, plan for less and compile again.

        C++ kernels are built once a plan is kept.

        Raises:
            BudgetError: The code of the lowest plan needs more than the budget.
        """
        side_file = self._side_file(partitioner)
        for _ in range(TIGHTENINGS):  # where an earlier process ended
            bytes_then = None if side_file is None else report_cache.recall(side_file).tightened_bytes
            if bytes_then is None:
                break
            partitioner = replace(partitioner, request=FitBelow(bytes_then))
            side_file = self._side_file(partitioner)
        for left in reversed(range(TIGHTENINGS + 1)):
            with recording() as reports, building_postponed(self.patches) as graphs:
                emissions = Emissions()
                compiled, partitioner = self._enter(partitioner, emissions)
                side_file = None if isinstance(partitioner.request, Resume) else side_file
                with sizes_at(partitioner.sizes):
                    reports[:] = with_scheduled_peak(reports, emissions)
                    if not reports and emissions.seen:
                        run = emissions.region_run()
                        reports.append(self._unplanned(partitioner, None if run is None else run.peak_bytes))
                tightened_bytes = (
                    bytes_to_plan_for(reports, partitioner.settings, partitioner.request) if left else None
                )
                if tightened_bytes is None:
                    reports[:] = settle(reports, partitioner.settings, partitioner.request)
                    if partitioner.settings.budget.kind == "bytes":
                        reports[:] = with_scheduled_range(reports, emissions)
                    self._keep(side_file, reports)
                    build(graphs)
                    return compiled
                if side_file is not None:
                    report_cache.store(side_file, Kept(tuple(reports), tightened_bytes))
                LOG.info("%s", reports[0])
                reports.clear()
            partitioner = replace(partitioner, request=FitBelow(tightened_bytes))
            side_file = self._side_file(partitioner)
        raise AssertionError("the last round returns")


def draws_in_turn(graph: fx.GraphModule) -> bool:
    """Whether several operators take numbers from a generator: their order decides which numbers each gets.

    What Inductor draws itself comes of one draw of seeds; `multinomial`, say, is called, and so is all under `fallback_random`.
    """
    return sum(map(is_random, graph.graph.nodes)) > 1
