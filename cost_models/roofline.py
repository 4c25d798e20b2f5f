"""The roofline model: a kernel takes its launch, then the longer of its arithmetic and its memory traffic.

The arithmetic is that of a step without a pause: at `Device.sustained_clock_ratio` of the rate of a burst.

Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. Both roofs are the device's figures times the fraction of them that such kernels
reach (`Device.efficiency`). For products (matrix products, convolutions, attention) the fraction depends on the size:

* each dimension counts as longer by a constant (`Device.half_sizes`): a dimension as long as its constant halves the
  rate, and a much longer one leaves all of it. So small products are slow, and products with one short dimension too;
* if the device states how many tiles run at once (`Device.multiprocessors`), partial tiles count as whole tiles, and
  partial waves of tiles as whole waves.

A convolution with one channel a group is no matrix product: if the device has an efficiency for it (``depthwise``,
``depthwise_backward``), it runs at that part of the float32 rate, whatever its size.

Bytes that are still in the cache (`cached_bytes`) are read at the cache's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from typing import TypeVar

from compile_remat.cost_models.device.description import Device
from compile_remat.cost_models.operators.kinds import HEAVY_KINDS, RUNS_NO_KERNEL, OpKind
from compile_remat.cost_models.operators.ops import Op
from compile_remat.cost_models.operators.products import Product

_NS = 1_000_000_000

Figure = TypeVar("Figure")

TILES = ((128, 128, 1.0), (64, 64, 0.75), (16, 64, 0.4))
"""Rows and columns of the tile of a result that one multiprocessor computes at a time, and the part of the rate that the
tile reaches at most. GPU libraries take large tiles for large products (NVIDIA, "Matrix Multiplication Background User's
Guide", tile and wave quantisation); small tiles read their operands more often. The parts are assumed, not measured."""

SPLIT_LENGTH = 256
"""Least length of k for each of the multiprocessors that share one tile (split-k). By split-k a product with few tiles
still fills the device."""


@dataclass(frozen=True)
class Roofline:
    """Prices by the figures of `device`.

    Attributes:
        device: Rates, bandwidth and launch time.
        tf32_kinds: Kinds whose float32 arithmetic runs at the device's ``tf32`` rate, if it has one. Torch's default
            is convolutions only; ``torch.set_float32_matmul_precision("high")`` adds the products.
    """

    device: Device
    tf32_kinds: tuple[OpKind, ...] = (OpKind.CONV,)

    @property
    def launch_time_ns(self) -> int:
        """The device's launch time."""
        return self.device.launch_ns

    @property
    def cache_bytes(self) -> int:
        """Bytes of recent traffic that the cache holds; 0 if the device does not state size and bandwidth of its cache."""
        return self.device.l2_bytes or 0 if self.device.l2_bandwidth_bytes_per_s else 0

    def op_time_ns(self, op: Op) -> int:
        """Launch plus the longer of arithmetic and traffic, in ns; 0 if no kernel runs."""
        if op.kind in RUNS_NO_KERNEL:
            return 0
        launch_ns = int(_figure(self._launches_ns, op, self.launch_time_ns))
        return launch_ns + max(self.arithmetic_time_ns(op), self.traffic_time_ns(op.read_bytes + op.write_bytes))

    def arithmetic_time_ns(self, op: Op) -> int:
        """Time of the operator's floating-point operations at the rate of its dtype, kind and size, in ns, rounded up.

        For an operator without operations: its traffic at the part of the bandwidth that the device states for it (gathers
        and scatters), or 0.
        """
        if op.flops == 0:
            part = self._efficiency.get(_packet(op.target))
            return 0 if part is None else ceil(self.traffic_time_ns(op.read_bytes + op.write_bytes) / part)
        burst_rate = self._rate(op) * self._fraction(op)
        return ceil(op.flops * _NS / (burst_rate * self.device.sustained_clock_ratio))

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        """Time of `nbytes` at the bandwidth that kernels reach, `cached_bytes` of them at the cache's; in ns, rounded up."""
        device = self.device
        from_memory = nbytes * _NS / (device.bandwidth_bytes_per_s * self._efficiency.get("bandwidth", 1.0))
        if not cached_bytes or not device.l2_bandwidth_bytes_per_s:
            return ceil(from_memory)
        cached_bytes = min(cached_bytes, nbytes)
        return ceil(from_memory * (1 - cached_bytes / nbytes) + cached_bytes * _NS / device.l2_bandwidth_bytes_per_s)

    def _rate(self, op: Op) -> float:
        """Operations per second. Inductor computes pointwise and reduction operators in float32, whatever their dtype."""
        part = self._depthwise(op)
        if part is not None:
            return self.device.rate("float32") * part
        dtype = op.dtype if op.kind in HEAVY_KINDS or op.kind is OpKind.OTHER else "float32"
        if dtype == "float32" and op.kind in self.tf32_kinds:
            dtype = "tf32"
        return self.device.rate(dtype) * _figure(self._efficiency, op, 1.0)

    def _fraction(self, op: Op) -> float:
        """Part of the large products' rate that a product of this size reaches; above that if causal attention skips work."""
        if op.product is None or not self._half_sizes or self._depthwise(op) is not None:
            return 1.0
        halves = _figure(self._half_sizes, op, (0.0, 0.0, 0.0))
        fraction = 1.0
        for length, half in zip(op.product[1:], halves, strict=True):
            fraction *= length / (length + half)
        if self.device.multiprocessors and op.kind is not OpKind.ATTENTION:
            fraction *= wave_fraction(op.product, self.device.multiprocessors)
        return fraction / op.visible

    def _depthwise(self, op: Op) -> float | None:
        """The device's efficiency for convolutions with one channel a group; None for other operators or if not stated."""
        if op.kind is not OpKind.CONV or op.product is None or op.product[0] == 1 or op.product[2] > 1:
            return None
        return self._efficiency.get("depthwise_backward" if "backward" in op.target else "depthwise")

    @cached_property
    def _efficiency(self) -> dict[str, float]:
        return dict(self.device.efficiency)

    @cached_property
    def _half_sizes(self) -> dict[str, tuple[float, ...]]:
        return dict(self.device.half_sizes)

    @cached_property
    def _launches_ns(self) -> dict[str, int]:
        return dict(self.device.launches_ns)


def wave_fraction(product: Product, multiprocessors: int) -> float:
    """Part of the rate that a product reaches with its best tile: useful part of the tiles, and of their waves, times `TILES`."""
    batch, m, n, k = product
    best = 0.0
    for rows, columns, part in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        splits = max(1, min(k // SPLIT_LENGTH, multiprocessors // tiles))
        waves = ceil(tiles * splits / multiprocessors)
        useful = batch * m * n / (tiles * rows * columns)
        best = max(best, part * useful * tiles * splits / (waves * multiprocessors))
    return best


def _figure(figures: dict[str, Figure], op: Op, default: Figure) -> Figure:
    """The figure of the operator, else of its kind, else `default`."""
    if not figures:
        return default
    found = figures.get(_packet(op.target))
    return figures.get(op.kind, default) if found is None else found


@cache
def _packet(target: str) -> str:
    """The operator without its overload: "aten.mm" for "aten.mm.default"."""
    return target.rpartition(".")[0] if target.count(".") > 1 else target
