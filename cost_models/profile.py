"""The profile model: measured times of operators that run as kernels of their own, and the roofline for all others.

Pointwise operators and reductions fuse, so their share of a kernel cannot be measured. The roofline prices them and all
operators that were not measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from compile_remat.cost_models.operators.ops import Op
from compile_remat.cost_models.protocol import CostModel
from compile_remat.cost_models.timing.replay import recipe_of


@dataclass(frozen=True, repr=False)
class Times:
    """Measured nanoseconds by signature, sorted by signature.

    The ``repr`` contains the hash of the contents, so that cache keys change with every figure.
    """

    by_signature: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(measured: Mapping[str, int]) -> Times:
        """Returns the measured times, given in ns by signature, as a `Times`."""
        return Times(tuple(sorted(measured.items())))

    def key(self) -> str:
        """Hash of the contents; "" if there are no times."""
        return hashlib.sha256(repr(self.by_signature).encode()).hexdigest()[:16] if self.by_signature else ""

    def of_nodes(self, nodes: Iterable[fx.Node]) -> tuple[tuple[str, int], ...]:
        """Names of the nodes whose operators were measured, with their times in ns."""
        known = dict(self.by_signature)
        if not known:
            return ()
        recipes = ((node.name, recipe_of(node)) for node in nodes)
        return tuple((name, known[r.signature]) for name, r in recipes if r is not None and r.signature in known)

    def __repr__(self) -> str:
        return f"Times({self.key()})"


class Profile:
    """Prices the operators of one graph.

    Args:
        base: Prices all that was not measured.
        times_ns: Names of the graph's nodes with the measured times of their operators.
    """

    def __init__(self, base: CostModel, times_ns: Sequence[tuple[str, int]] = ()) -> None:
        self.base, self.times_ns = base, tuple(times_ns)
        self._time_ns = dict(self.times_ns)

    @property
    def launch_time_ns(self) -> int:
        """The launch time of the base model."""
        return self.base.launch_time_ns

    def op_time_ns(self, op: Op) -> int:
        """The measured time of the operator; the time of the base model if the operator was not measured."""
        measured = self._time_ns.get(op.name)
        return self.base.op_time_ns(op) if measured is None else measured

    def arithmetic_time_ns(self, op: Op) -> int:
        """The arithmetic time of the base model: a measured time does not separate arithmetic from traffic."""
        return self.base.arithmetic_time_ns(op)

    @property
    def cache_bytes(self) -> int:
        """The cache size of the base model."""
        return self.base.cache_bytes

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        """The traffic time of the base model."""
        return self.base.traffic_time_ns(nbytes, cached_bytes)
