"""What the planner may ask of a cost model."""

from __future__ import annotations

from typing import Protocol

from compile_remat.cost_models.operators.ops import Op


class CostModel(Protocol):
    """Prices one operator on one device, in whole nanoseconds; `passes` prices fused groups out of its parts.

    An implementation is an immutable, picklable value: the same counts always get the same price, whatever else the
    machine does. It knows nothing of plans.
    """

    @property
    def launch_time_ns(self) -> int:
        """Time that a kernel takes before it does anything."""
        ...

    @property
    def cache_bytes(self) -> int:
        """How much may be read and written after a result before the cache no longer holds it; 0: it never does."""
        ...

    def op_time_ns(self, op: Op) -> int:
        """The operator as one kernel of its own, launch included; 0 where no kernel runs."""
        ...

    def arithmetic_time_ns(self, op: Op) -> int:
        """The arithmetic alone."""
        ...

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        """Moving `nbytes` between a kernel and device memory, `cached_bytes` of them only as far as the cache."""
        ...
