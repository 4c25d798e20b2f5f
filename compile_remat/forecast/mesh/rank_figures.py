"""Memory and time of one rank of a mesh, and the plans of its graphs: what people get, as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from compile_remat.forecast.mesh.step_moments import StepMoment
from compile_remat.passes import Plan

BY_RULES = "the graphs of a rank are not lowered"
"""Why the plans of ranks are estimates."""


@dataclass(frozen=True)
class RankGraph:
    """One of the different graphs of a step.

    Attributes:
        name: The first block that it is, or under DDP the first piece between buckets; empty for what lies around blocks, or for
            the whole model.
        calls: How often it runs in a step.
        plan: Its plan; the plan's peak is that of its own run.
    """

    name: str
    calls: int
    plan: Plan


@dataclass(frozen=True)
class RankForecast:
    """Memory and time of one training step on rank 0 of a mesh, which holds as much as any other.

    Attributes:
        mesh: As ``dp=8,tp=2``.
        shard: How parameters are spread over the data parallel ranks, one of `layout.SHARDS`.
        sizes: Of this rank's batch.
        parameter_bytes: Of its parts of parameters, and of buffers.
        gradient_bytes: Of its parts of gradients, as they are when the step ends.
        optimizer_bytes: Of the optimizer's state for its parts.
        input_bytes: Of what the model is called with.
        gathered_bytes: The most that FSDP2's gathered parameters take at once; part of `beside_bytes`.
        beside_bytes: The most that DDP or FSDP2 holds beside graphs: gathered parameters, reduce buckets, gradients' parts.
        peak_bytes: The most that the step's graphs hold at once.
        peak_moment: The moment of the step at which graphs, wrapper and optimizer together hold the most.
        floor_bytes: The lowest that this could be.
        limit_bytes: Capacity less the reserve and cuBLAS's workspaces; None where the device has no known capacity.
        graphs: The different graphs with their plans.
        kernel_time_ns: Estimated time of all kernels, those of recomputed values included.
        collective_time_ns: Estimated time of all collectives; None where the device's links are not known.
        step_time_ns: Estimated time of forward and backward, with what kernels hide of the collectives taken off.
        extra_time_ns: The kernels' time beyond that under plain torch.compile, or of graphs of which that is not known, under
            their fastest plans.
        param_dtype: What FSDP2 gathers parameters in; empty for their own type.
        plain_peak_bytes: The graphs' peak under plain torch.compile; None unless the budget is a fraction of it.
        message: How the plans differ from what was asked.
        seconds: Wall time of the forecast.
    """

    model: str
    device: str
    mesh: str
    shard: str
    num_ranks: int
    dtype: str
    optimizer: str
    sizes: dict[str, int]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    gathered_bytes: int
    beside_bytes: int
    peak_bytes: int
    peak_moment: StepMoment
    floor_bytes: int
    limit_bytes: int | None
    budget_bytes: int | None
    graphs: tuple[RankGraph, ...]
    kernel_time_ns: int
    collective_time_ns: int | None
    step_time_ns: int
    extra_time_ns: int
    param_dtype: str = ""
    plain_peak_bytes: int | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the step's peak."""
        return self.parameter_bytes + self.optimizer_bytes + self.input_bytes + self.peak_moment.nbytes

    @property
    def fits(self) -> bool | None:
        """Whether that is within the device's limit; None where that is not known."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def exposed_time_ns(self) -> int | None:
        """What collectives add to the kernels' time."""
        return None if self.collective_time_ns is None else self.step_time_ns - self.kernel_time_ns

    def to_json(self) -> str:
        """All figures, with the plan of each graph."""
        data = asdict(replace(self, graphs=()))
        graphs = [{"name": g.name, "calls": g.calls, "plan": json.loads(g.plan.to_json())} for g in self.graphs]
        own = {"total_bytes": self.total_bytes, "fits": self.fits, "exposed_time_ns": self.exposed_time_ns}
        said = {"facts": "estimated", "why": BY_RULES}
        return json.dumps({**data, **own, **said, "graphs": graphs}, indent=1)
