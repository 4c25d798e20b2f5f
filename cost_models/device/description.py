"""The figures of one device: what a data sheet says, and which part of it kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
"""Types of arithmetic that a device may state a rate for; float32 it must."""

_FALLBACK = {"tf32": "float32", "bfloat16": "float32", "float16": "float32", "float8": "bfloat16"}

GPU_EFFICIENCY = (
    ("attention", 0.5),
    ("bandwidth", 0.8),
    ("conv", 0.5),
    ("matmul", 0.7),
    ("other", 0.5),
    ("pointwise", 0.5),
    ("reduction", 0.5),
)
"""Fraction of the published figures that large kernels reach: for each kind of operator of the rate, and of the bandwidth.

Assumed, not measured: one rule-of-thumb constant each, to be replaced by measurements. Pointwise code gets half because
not all of it is multiply-adds.
"""

GPU_HALF_SIZES = (
    ("attention", (32.0, 32.0, 8.0)),
    ("conv", (0.0, 0.0, 32.0)),
    ("matmul", (0.0, 0.0, 64.0)),
)
"""Lengths at which products reach half of that; see `Device.half_sizes`.

Assumed, not measured: the time that it takes to fill and empty the pipeline of a tile; short rows and columns are priced
by whole tiles. `compile-remat calibrate` measures them.
"""

DEFAULT_LAUNCH_NS = 4_000
"""Time that a GPU kernel takes before it does anything: assumed, of the order of a few microseconds."""


@dataclass(frozen=True)
class Device:
    """Figures of one device.

    `efficiency`, `half_sizes` and `launches_ns` are looked up by operator first ("aten.addmm"), then by kind ("matmul").

    Attributes:
        name: name in the table, or of the file or hardware it came from.
        memory_bytes: capacity, or None where it does not limit or is not known.
        bandwidth_bytes_per_s: of device memory, read and write together.
        flops_per_s: dense rate for each type of `DTYPES` that the device states, sorted by type.
        launch_ns: time of an empty kernel, in nanoseconds.
        efficiency: fraction of the rate reached by each kind of operator or by one operator, and of the bandwidth; that of
            ``depthwise`` and ``depthwise_backward`` is of the float32 rate;
            sorted. Absent is 1. A calibrated file may say more than 1 of an operator that is cheaper than assumed.
        sources: the documents that the figures come from.
        host_bandwidth_bytes_per_s: of the link to the host, in one direction; None where there is none or it is not known.
        l2_bytes: size of the last cache before device memory that a kernel's result may stay in for the next one.
        l2_bandwidth_bytes_per_s: of that cache; None: what lies there is priced as if it came from memory.
        multiprocessors: how many tiles of a product run at once; None: products are not priced by whole waves of tiles.
        blas_workspace_bytes: what torch allocates for each handle of cuBLAS (hipBLAS) when it is first used; None: nothing, or not
            known.  Source of the table's figures: ``parseChosenWorkspaceSize`` in ``ATen/cuda/CublasHandlePool.cpp``.
        node_link: link to the devices of the same node, a name of `links.json`; None: not known.
        network_link: link to those of other nodes; None: not known.
        half_sizes: for products, the lengths (m, n, k) at which each dimension alone would halve the rate; sorted.
            Absent is 0: the rate does not depend on the size.
        launches_ns: launch of kinds or operators whose own differs from `launch_ns`; sorted.
        compute_capability: of a CUDA device, as "9.0": which code Inductor makes for it; None: no such device, or not known.
    """

    name: str
    memory_bytes: int | None
    bandwidth_bytes_per_s: int
    flops_per_s: tuple[tuple[str, int], ...]
    launch_ns: int = DEFAULT_LAUNCH_NS
    efficiency: tuple[tuple[str, float], ...] = GPU_EFFICIENCY
    sources: tuple[str, ...] = ()
    host_bandwidth_bytes_per_s: int | None = None
    l2_bytes: int | None = None
    l2_bandwidth_bytes_per_s: int | None = None
    multiprocessors: int | None = None
    half_sizes: tuple[tuple[str, tuple[float, ...]], ...] = GPU_HALF_SIZES
    launches_ns: tuple[tuple[str, int], ...] = ()
    blas_workspace_bytes: int | None = None
    node_link: str | None = None
    network_link: str | None = None
    compute_capability: str | None = None

    def rate(self, dtype: str) -> int:
        """Dense operations per second in `dtype`; for a type it does not state, that of the wider type it runs as."""
        rates = dict(self.flops_per_s)
        while dtype not in rates:
            dtype = _FALLBACK.get(dtype, "float32")
        return rates[dtype]
