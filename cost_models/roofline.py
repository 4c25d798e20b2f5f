"""The roofline model: a kernel takes its launch, then the longer of its arithmetic and its memory traffic.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. Both roofs are the device's figures times the fraction of them that such kernels
reach (`Device.efficiency`), one constant for each kind of operator: a first approximation that knows nothing of sizes,
so it flatters small and skinny matrix products, and it sees no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from compile_remat.cost_models.devices import Device
from compile_remat.cost_models.kinds import HEAVY_KINDS, RUNS_NO_KERNEL, OpKind
from compile_remat.cost_models.ops import Op

_NS = 1_000_000_000


@dataclass(frozen=True)
class Roofline:
    """Prices by the figures of `device`.

    Attributes:
        device: rates, bandwidth and launch time.
        tf32_kinds: kinds whose float32 arithmetic runs at the device's ``tf32`` rate, where it has one. Torch's default
            is convolutions only; ``torch.set_float32_matmul_precision("high")`` adds the products.
    """

    device: Device
    tf32_kinds: tuple[OpKind, ...] = (OpKind.CONV,)

    @property
    def name(self) -> str:
        """The value of the setting ``cost_model``."""
        return "roofline"

    @property
    def launch_time_ns(self) -> int:
        """The device's launch time."""
        return self.device.launch_ns

    def key(self) -> str:
        """Every figure that a price depends on; neither the device's name nor its capacity is one."""
        device = self.device
        figures = (device.bandwidth_bytes_per_s, device.flops_per_s, device.launch_ns, device.efficiency)
        return f"roofline:{figures}:{','.join(self.tf32_kinds)}"

    def op_time_ns(self, op: Op) -> int:
        """Launch plus the longer of arithmetic and traffic; 0 where no kernel runs."""
        return self.group_time_ns((op,), read_bytes=op.read_bytes, write_bytes=op.write_bytes)

    def arithmetic_time_ns(self, op: Op) -> int:
        """Floating-point operations at the rate of the operator's type and kind, rounded up."""
        if op.flops == 0:
            return 0
        return ceil(op.flops * _NS / self._rate(op))

    def traffic_time_ns(self, nbytes: int) -> int:
        """Bytes at the bandwidth that kernels reach, rounded up."""
        return ceil(nbytes * _NS / (self.device.bandwidth_bytes_per_s * self.device.efficiency_of("bandwidth")))

    def group_time_ns(self, ops: Sequence[Op], *, read_bytes: int, write_bytes: int) -> int:
        """Launch plus the longer of the summed arithmetic and the traffic in and out; 0 if none of `ops` runs."""
        if all(op.kind in RUNS_NO_KERNEL for op in ops):
            return 0
        arithmetic = sum(self.arithmetic_time_ns(op) for op in ops)
        return self.launch_time_ns + max(arithmetic, self.traffic_time_ns(read_bytes + write_bytes))

    def _rate(self, op: Op) -> float:
        """Operations per second. Inductor computes pointwise and reduction operators in float32, whatever is stored."""
        dtype = op.dtype if op.kind in HEAVY_KINDS or op.kind is OpKind.OTHER else "float32"
        if dtype == "float32" and op.kind in self.tf32_kinds:
            dtype = "tf32"
        return self.device.rate(dtype) * self.device.efficiency_of(op.kind)
