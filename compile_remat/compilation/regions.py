"""Makes the region around a graph's compiled code, with the hooks that the settings ask for, and compiles it again later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from compile_remat._util.size_range import Sizes
from compile_remat.compilation.recompile import Recompiler
from compile_remat.config import RematConfig
from compile_remat.device import free_memory
from compile_remat.errors import BudgetError
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.planning.plain_peaks import note_plain_peak
from compile_remat.planning.request import FitBelow, Request
from compile_remat.planning.settings import positions_of, sizes_of, with_plain_bytes, without_failed_copies
from compile_remat.runtime.changed_inputs import ChangedInputs
from compile_remat.runtime.early_gradients import EarlyGradients
from compile_remat.runtime.oom_recovery import OomRecovery
from compile_remat.runtime.peak_monitor import PeakMonitor, reader_of
from compile_remat.runtime.refused_region import RefusedRegion, Variant
from compile_remat.runtime.region import CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.shared_budget import SharedBudget
from compile_remat.runtime.size_ladder import SizeLadder


@dataclass(frozen=True)
class RegionMaker:
    """Makes the region of a graph once its first plan is found; holds none of the graph's inputs.

    Attributes:
        partitioner: Partitioner of the first compilation; later ones have other requests, sizes and observed plain peaks.
        place: The device that the graph runs on.
        positions: The symbols among the graph's arguments and their positions.
        shared: The budget that the graph shares with other graphs of its device; None if there is none.
        recompiler: Compiles the graph again; None if that is impossible.
        communicates: True if all ranks take part in the graph.
        names: Names of all arguments, as the user writes them.
    """

    config: RematConfig
    partitioner: RematPartitioner
    place: torch.device
    positions: tuple[tuple[str, int], ...]
    shared: SharedBudget | None
    recompiler: Recompiler | None
    communicates: bool
    names: tuple[str, ...]

    def region(self, running: RunningPlan, written: frozenset[int] | None) -> CompiledRegion:
        """The region of a graph that has a plan.

        Args:
            written: Positions of the inputs that the graph writes into; None if unknown.
        """
        config, shared, report = self.config, self.shared, running.report
        hooks: list[Hook] = [
            ChangedInputs(self.names, config.inputs, checks=config.check, report_dir=config.report_dir)
        ]
        hooks += [EarlyGradients()] if self.partitioner.early else []
        hooks += [] if shared is None else [shared]
        if report.size_range is not None:
            beside = None if shared is None else shared.option_at_larger_sizes
            hooks.append(SizeLadder(self.positions, running, beside))
        reader = None if config.check else reader_of(self.place)
        hooks.append(PeakMonitor(report.graph_key, config.report_dir, reader))
        if self.recompiler is None:
            return CompiledRegion(running, hooks)
        if config.oom_retry:
            hooks.append(
                OomRecovery(
                    retries=config.oom_retry,
                    device=self.place,
                    available=functools.partial(free_memory.free_bytes, self.place, config.capacity),
                    written=written,
                    limit_bytes=report.budget_bytes if self.partitioner.settings.budget.kind == "bytes" else None,
                    is_minimum=self.partitioner.settings.budget.kind == "min",
                    communicates=self.communicates,
                )
            )
        return CompiledRegion(running, hooks, self.recompile, self.recompiler.publish)

    def recompile(self, request: Request, sizes: Sizes, *, may_assume: bool = False) -> RunningPlan | None:
        """Compile another plan of the graph, for `sizes` if there are any; returns None if no plan compiles.

        Args:
            may_assume: See `Recompiler.compile`.

        Raises:
            BudgetError: No plan fits.
        """
        assert self.recompiler is not None
        first, shared = self.partitioner, self.shared
        settings = first.settings if shared is None else replace(first.settings, budget=shared.budget)
        settings = without_failed_copies(with_plain_bytes(settings))
        guarded = first.guarded or isinstance(request, FitBelow)
        wanted = replace(first, settings=settings, request=request, guarded=guarded, sizes=sizes or first.sizes)
        found = self.recompiler.compile(wanted, may_assume=may_assume)
        if found is None:
            return None
        note_plain_peak(settings.device.name, found[1])  # on a cache hit no planner has noted it
        return RunningPlan(*found)

    def refused(self, error: BudgetError, request: Callable[[], Request]) -> RefusedRegion:
        """The region of a graph of varying sizes that was refused at the sizes of its first call.

        Args:
            error: The error of the first call.
            request: Returns the plan request of a later call.
        """
        first, recompiler = self.partitioner, self.recompiler
        assert recompiler is not None
        names = dict(first.sizes)
        positions = [(name, k) for name, k in self.positions if name in names]
        return RefusedRegion(positions, request, self._begin, (first.request, first.sizes), error)

    def _begin(self, request: Request, sizes: Sizes) -> Variant | None:
        recompiler = None if self.recompiler is None else self.recompiler.at(sizes)
        if recompiler is None:
            return None
        inputs = recompiler.compilation.example_inputs
        first = replace(self.partitioner, sizes=sizes_of(inputs), request=request)
        maker = replace(self, partitioner=first, positions=positions_of(inputs), recompiler=recompiler)
        running = maker.recompile(request, first.sizes, may_assume=True)
        if running is None:
            return None
        recompiler.publish(running.report, replaces=False)
        return Variant(maker.region(running, recompiler.compilation.written), recompiler.guards_hold)
