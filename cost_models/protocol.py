"""The interface of a cost model."""

from __future__ import annotations

from typing import Protocol

from compile_remat.cost_models.operators.ops import Op


class CostModel(Protocol):
    """Prices one operator on one device, in whole nanoseconds; `passes` prices fused groups from launch, arithmetic and traffic.

    An implementation is an immutable, picklable value: equal counts always get equal prices, whatever the load of the machine.
    Prices do not depend on plans.
    """

    @property
    def launch_time_ns(self) -> int:
        """Time in ns that a kernel takes before it starts to work."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Bytes that may be read and written after a result while the cache still holds it; 0 if it never does."""
        ...

    def op_time_ns(self, op: Op) -> int:
        """Time of the operator as a kernel of its own, launch included; 0 if it runs no kernel."""
        ...

    def arithmetic_time_ns(self, op: Op) -> int:
        """Time of the operator's arithmetic alone."""
        ...

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        """Time to move `nbytes` between a kernel and device memory, of which the cache holds `cached_bytes`."""
        ...
