"""Memory and time of one rank of a mesh, and the plans of its graphs, as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from compile_remat.forecast.mesh.step_moments import StepMoment
from compile_remat.passes import Plan

BY_RULES = "the graphs of a rank are not lowered"
"""The reason why plans of ranks are estimates."""


@dataclass(frozen=True)
class RankGraph:
    """One of the different graphs of a step.

    Attributes:
        name: The first block with this graph, or under DDP the first piece between buckets; empty for a part between blocks, and
            for the whole model.
        calls: Number of its runs in a step.
        plan: Its plan; the plan's peak is the peak of one run of the graph alone.
    """

    name: str
    calls: int
    plan: Plan


@dataclass(frozen=True)
class RankForecast:
    """Memory and time of one training step on rank 0 of a mesh, which holds as much as any other.

    Attributes:
        model: Name of the builder.
        device: Name of the device of each rank.
        mesh: The mesh as text, such as ``dp=8,tp=2``.
        shard: Kind of data parallelism, one of `layout.SHARDS`.
        num_ranks: The number of ranks.
        dtype: Dtype of this rank's shards.
        optimizer: The setting `optimizer_state`.
        sizes: Sizes of this rank's batch.
        parameter_bytes: Bytes of this rank's shards of parameters, and of buffers.
        gradient_bytes: Bytes of its shards of gradients at the end of the step.
        optimizer_bytes: Bytes of the optimizer's state for its shards.
        input_bytes: Bytes of the model's inputs.
        gathered_bytes: Peak bytes of FSDP2's gathered parameters; part of `beside_bytes`.
        beside_bytes: Peak bytes that DDP or FSDP2 holds beside graphs: gathered parameters, reduce buckets, shards of gradients.
        peak_bytes: Peak bytes of the step's graphs.
        peak_moment: The moment of the step at which graphs, wrapper and optimizer together hold the most bytes.
        floor_bytes: The lowest reachable `peak_bytes`.
        limit_bytes: Capacity less the reserve and cuBLAS's workspaces; None if the device has no known capacity.
        budget_bytes: The budget of the step's graphs; None if the setting stands for no number of bytes.
        graphs: The different graphs with their plans.
        kernel_time_ns: Estimated time of all kernels, those of recomputed values included, and their waits for copies.
        collective_time_ns: Estimated time of all collectives; None if the device's links are not known.
        step_time_ns: Estimated time of forward and backward, without the part of the collectives that kernels hide.
        extra_time_ns: The kernels' time beyond that under plain torch.compile, or for graphs for which that is not known, beyond
            that of their fastest plans.
        param_dtype: Dtype in which FSDP2 gathers parameters; empty for their own dtype.
        node_ranks: The number of ranks that share a node, and its host's memory.
        plain_peak_bytes: The graphs' peak under plain torch.compile; None unless the budget is a fraction of it.
        message: Difference between the plans and the request; empty if there is none.
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
    node_ranks: int = 1
    plain_peak_bytes: int | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes on the device at the step's peak."""
        return self.parameter_bytes + self.optimizer_bytes + self.input_bytes + self.peak_moment.nbytes

    @property
    def fits(self) -> bool | None:
        """True if `total_bytes` is within the device's limit; None if the limit is not known."""
        return None if self.limit_bytes is None else self.total_bytes <= self.limit_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that this rank's saved tensors take; graphs that share a budget move nothing."""
        return sum(graph.plan.host_bytes for graph in self.graphs)

    @property
    def node_host_bytes(self) -> int:
        """Bytes of host memory that all ranks of a node take."""
        return self.node_ranks * self.host_bytes

    @property
    def exposed_time_ns(self) -> int | None:
        """Time that collectives add to the kernels' time; None if the device's links are not known."""
        return None if self.collective_time_ns is None else self.step_time_ns - self.kernel_time_ns

    def to_json(self) -> str:
        """Returns all figures, with the plan of each graph, as JSON text."""
        data = asdict(replace(self, graphs=()))
        graphs = [{"name": g.name, "calls": g.calls, "plan": json.loads(g.plan.to_json())} for g in self.graphs]
        names = ("total_bytes", "fits", "exposed_time_ns", "host_bytes", "node_host_bytes")
        own = {name: getattr(self, name) for name in names}
        said = {"facts": "estimated", "why": BY_RULES}
        return json.dumps({**data, **own, **said, "graphs": graphs}, indent=1)
