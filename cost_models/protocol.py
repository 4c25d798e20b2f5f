"""What the planner may ask of a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from compile_remat.cost_models.operators.ops import Op


class CostModel(Protocol):
    """Prices one operator or one fused group on one device, in whole nanoseconds.

    An implementation is an immutable, picklable value: the same counts always get the same price, whatever else the
    machine does. It knows nothing of plans.
    """

    @property
    def name(self) -> str:
        """Name of the model, as in the setting ``cost_model``."""
        ...

    @property
    def launch_time_ns(self) -> int:
        """Time that a kernel takes before it does anything."""
        ...

    @property
    def cache_bytes(self) -> int:
        """How much may be read and written after a result before the cache no longer holds it; 0: it never does."""
        ...

    def key(self) -> str:
        """The model and every figure that can change a price; becomes part of cache keys."""
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

    def group_time_ns(self, ops: Sequence[Op], *, read_bytes: int, write_bytes: int) -> int:
        """One fused kernel that reads `read_bytes` from outside the group and leaves `write_bytes` behind.

        What passes between the operators inside the group stays in registers and is not charged.
        """
        ...
