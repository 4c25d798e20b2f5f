"""Peaks of plain torch.compile for a graph: torch's own partition under the user's options, lowered and read without code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.dynamo.retrace import RestartAnalysis
from compile_remat._util.collector import collector_paused
from compile_remat._util.size_range import Sizes
from compile_remat.compilation.feedback import Emissions
from compile_remat.compilation.readings import PlanTaken, Readings
from compile_remat.compilation.region_run import RegionRun
from compile_remat.errors import find_error, warn
from compile_remat.inductor.entry import (
    NO_CACHES,
    CustomPartitionerFn,
    compile_with_partitioner,
    without_partition_cache,
)
from compile_remat.inductor.install import joint_keywords
from compile_remat.inductor.light_code.graph_state import ProcessCounts
from compile_remat.inductor.suppressed_errors import unlogged
from compile_remat.passes import PlainFacts


class PlainPartitioner(CustomPartitionerFn):
    """Torch's own partitioner without a memory budget."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return joint_graph.plain_partition(gm, joint_inputs, **joint_keywords(kwargs))

    def uuid(self) -> object:
        """A constant, as this partitioner has no settings."""
        return "plain"


def lowered_plain(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any], sizes: Sizes
) -> PlainFacts | None:
    """The facts of torch's own partition of a graph; None, with a warning, if it cannot be lowered or its code is not understood.

    Args:
        gm: The graph, which Inductor rewrites.
        patches: Inductor's options, as the user gave them.
        sizes: Sizes of the symbols in the dry run.

    Raises:
        RestartAnalysis: Dynamo has to trace the graph anew.
    """
    seen: list[RegionRun] = []
    before, emissions = ProcessCounts(), Emissions()
    reason = "its code is not understood"
    try:
        with collector_paused(), without_partition_cache(), unlogged(PlanTaken):
            compile_with_partitioner(
                gm,
                example_inputs,
                PlainPartitioner(),
                {**patches, **NO_CACHES},
                guarded=False,
                observer=emissions,
                before_code=Readings(seen.append, sizes, stops=True),
            )
    except Exception as error:
        if find_error(error, RestartAnalysis) is not None:
            raise
        if find_error(error, PlanTaken) is None:
            reason = f"{type(error).__name__}: {error}"
    finally:
        before.put_back()
    run = seen[0] if seen else emissions.region_run()
    if run is None:
        warn(f"the peak of plain torch.compile is estimated, because Inductor's graphs of it cannot be read ({reason})")
        return None
    return PlainFacts(run.peak_bytes, run.peak_bytes) if run.facts is None else PlainFacts.of(run.facts)
