"""Compiles a user's graph again in a later step: on fake inputs, under the conditions of the first compilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from compile_remat._torch.ambient import Ambient, compiling_as_dynamo_does
from compile_remat._torch.dynamo.retrace import guards_hold, inputs_at
from compile_remat._torch.tensor_arguments import guards_of, scalars_as_numbers, traced_inputs
from compile_remat._util.size_range import Sizes
from compile_remat.compilation.driver import Compilation
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.report import Report, record, recording, retire


@dataclass(frozen=True)
class Recompiler:
    """A compilation that can run again in any thread, but not beside Dynamo's; the example inputs may be gone by then.

    Attributes:
        compilation: The graph, with fake inputs in place of the example inputs.
        ambient: State of autocast at the first compilation.
    """

    compilation: Compilation
    ambient: Ambient

    def publish(self, report: Report, *, replaces: bool = True) -> None:
        """Record a report that `compile` returned, once it is decided that its plan runs.

        Args:
            replaces: True if the plan replaces all other plans of the graph.
        """
        if replaces:
            retire(self.compilation.region, self.compilation.config.report_dir)
        record(report)
        self.compilation.write([report])

    def at(self, sizes: Sizes) -> Recompiler | None:
        """A recompiler of the graph as if its first call had these sizes; None if the graph's inputs cannot be made again."""
        first = self.compilation
        inputs = inputs_at(first.example_inputs, dict(sizes))
        if inputs is None:
            return None
        again = Compilation(first.gm, inputs, first.config, first.patches, first.region, first.plain, first.name)
        return replace(self, compilation=again)

    def guards_hold(self, sizes: Sizes) -> bool:
        """Returns whether all guards on the graph's sizes hold at these sizes."""
        return guards_hold(self.compilation.example_inputs, sizes)

    def compile(
        self, partitioner: RematPartitioner, *, may_assume: bool = False
    ) -> tuple[Callable[..., Any], Report] | None:
        """Compile another plan without recording its report; returns None if there is no plan, or if it adds guards on sizes.

        Args:
            may_assume: True to allow new guards, as the caller compares each call with them.
        """
        guards = guards_of(self.compilation.example_inputs)
        with compiling_as_dynamo_does(), ExitStack() as stack:
            self.ambient.enter(stack)
            stack.enter_context(scalars_as_numbers(self.compilation.example_inputs))
            reports = stack.enter_context(recording())
            try:
                compiled, own = self.compilation.run(partitioner, is_trial=True)
                report = own[-1] if own else None
            finally:
                reports.clear()
        has_assumed = guards_of(self.compilation.example_inputs) != guards
        if report is None or report.plan is None or (has_assumed and not may_assume):
            return None
        return compiled, report


def recompiler_of(compilation: Compilation) -> Recompiler | None:
    """A recompiler of the graph for later steps; None if Dynamo keeps no fake inputs of the graph."""
    traced = traced_inputs(compilation.gm)
    if traced is None or len(traced) != len(compilation.example_inputs):
        return None
    first = compilation
    again = Compilation(first.gm, traced, first.config, first.patches, first.region, first.plain, first.name)
    return Recompiler(again, Ambient.now())
