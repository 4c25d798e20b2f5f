"""The unit model: every kernel costs one nanosecond, so that plans can be checked by hand."""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat.cost_models.operators.kinds import RUNS_NO_KERNEL
from compile_remat.cost_models.operators.ops import Op


@dataclass(frozen=True)
class UnitCost:
    """One nanosecond for each operator that runs a kernel; bytes and launches are free.

    So fusion saves no time, and the extra time of a plan is the number of operators that it recomputes. The choice
    "testing" of torch's own ``activation_memory_budget_runtime_estimator`` counts in the same way.
    """

    @property
    def launch_time_ns(self) -> int:
        """0."""
        return 0

    @property
    def cache_bytes(self) -> int:
        """0."""
        return 0

    def op_time_ns(self, op: Op) -> int:
        """1 for an operator that runs a kernel, else 0."""
        return 0 if op.kind in RUNS_NO_KERNEL else 1

    def arithmetic_time_ns(self, op: Op) -> int:
        """Equals `op_time_ns`."""
        return self.op_time_ns(op)

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        """0."""
        return 0
