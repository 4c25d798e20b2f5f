"""The figures of one device: data sheet figures, and the fractions of these that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
"""Types of arithmetic for which a device may state a rate; float32 is required."""

_FALLBACK = {"tf32": "float32", "bfloat16": "float32", "float16": "float32", "float8": "bfloat16"}

GPU_EFFICIENCY = (
    ("aten._scaled_dot_product_cudnn_attention_backward", 0.43),
    ("aten._scaled_dot_product_efficient_attention_backward", 0.43),
    ("aten._scaled_dot_product_flash_attention_backward", 0.43),
    ("attention", 0.57),
    ("bandwidth", 0.9),
    ("conv", 0.5),
    ("matmul", 0.81),
    ("other", 0.5),
    ("pointwise", 0.45),
    ("reduction", 1.0),
)
"""Fraction of the published figures that large kernels reach in a burst: of the rate of each kind of operator, and of the
bandwidth.

Products, attention, and kernels of pointwise arithmetic and of sums reached about these parts in the plain steps of a GPT and a
Llama on an H200 (bfloat16, torch 2.11; `python -m benchmarks.gpu_prices`), and copies this part of the bandwidth. That other GPUs
reach as much is an assumption. The parts of convolutions and of other operators are rules of thumb.
"""

GPU_HALF_SIZES = (
    ("attention", (32.0, 32.0, 8.0)),
    ("conv", (0.0, 0.0, 32.0)),
    ("matmul", (0.0, 0.0, 64.0)),
)
"""Lengths (m, n, k) at which products reach half of that rate; see `Device.half_sizes`.

The lengths are assumed, not measured, and stand for the time to fill and empty the pipeline of a tile; short rows and
columns are priced by whole tiles. `compile-remat calibrate` measures the lengths.
"""

HOST_SHARE = 0.83
"""Part of a PCIe link's bandwidth that copies reach, 53 of 64 GB/s.  Assumed, not measured: a user of nvbandwidth expects 51 while
both directions copy (issue 53 of NVIDIA/nvbandwidth).  `compile-remat calibrate` measures a link."""

HOST_COPY_SLOWDOWN = 0.01
"""A copy of 53 GB/s takes about this part of an H100's or H200's bandwidth from the kernels beside it.  Assumed where
`compile-remat calibrate` has not measured it."""

DEFAULT_LAUNCH_NS = 1_000
"""Time in ns from one GPU kernel to the next where launches wait in a queue: the 984 kernels of a step of ResNet-50 on an H200 took
0.97 ms less than the step."""


@dataclass(frozen=True)
class Device:
    """Figures of one device.

    `efficiency`, `half_sizes` and `launches_ns` are looked up by operator first ("aten.addmm"), then by kind ("matmul").

    Attributes:
        name: Name in the table, or of the file or hardware that the device came from.
        memory_bytes: Capacity; None if it sets no limit or is not known.
        bandwidth_bytes_per_s: Bandwidth of device memory, reads and writes together.
        flops_per_s: Dense rate for each type of `DTYPES` that the device states, sorted by type.
        launch_ns: Time of an empty kernel, in nanoseconds.
        efficiency: Fraction of the rate reached by each kind of operator or by one operator, and of the bandwidth, sorted;
            ``depthwise`` and ``depthwise_backward`` are fractions of the float32 rate. A missing one is 1. A calibrated file
            may give more than 1 for an operator that is cheaper than assumed.
        sources: The documents that the figures come from.
        host_bandwidth_bytes_per_s: Bandwidth of the link to the host, in one direction; None if there is none or it is not known.
        to_host_bytes_per_s, from_host_bytes_per_s: Rates that copies of pinned memory reach beside kernels; None for
            `HOST_SHARE` of the bandwidth.
        host_copy_slowdown: Part of the time of such a copy by which the kernels beside it take longer.
        l2_bytes: Size of the last cache before device memory in which a kernel's result may stay for the next kernel.
        l2_bandwidth_bytes_per_s: Bandwidth of that cache; None prices cached bytes as if they came from memory.
        multiprocessors: Number of tiles of a product that run at once; None does not price products by whole waves of tiles.
        blas_workspace_bytes: Bytes that torch allocates for each handle of cuBLAS (hipBLAS) at its first use; None if there are
            none or not known.  Source of the table's figures: ``parseChosenWorkspaceSize`` in ``ATen/cuda/CublasHandlePool.cpp``.
        node_link: Link to the devices of the same node, a name of `links.json`; None if not known.
        network_link: Link to the devices of other nodes, a name of `links.json`; None if not known.
        half_sizes: For products, the lengths (m, n, k) at which each dimension alone would halve the rate; sorted.
            A missing one is 0: the rate does not depend on the size.
        launches_ns: Launch time in ns of kinds or operators for which it differs from `launch_ns`; sorted.
        sustained_clock_ratio: Clock of a training step over that of a burst, at most 1: a large device that computes without a
            pause lowers its clock to keep within its power. It slows arithmetic, and traffic with memory not.
        compute_capability: Compute capability of a CUDA device, such as "9.0", for which Inductor generates code; None for other
            devices or if not known.
    """

    name: str
    memory_bytes: int | None
    bandwidth_bytes_per_s: int
    flops_per_s: tuple[tuple[str, int], ...]
    launch_ns: int = DEFAULT_LAUNCH_NS
    efficiency: tuple[tuple[str, float], ...] = GPU_EFFICIENCY
    sources: tuple[str, ...] = ()
    host_bandwidth_bytes_per_s: int | None = None
    to_host_bytes_per_s: int | None = None
    from_host_bytes_per_s: int | None = None
    host_copy_slowdown: float = HOST_COPY_SLOWDOWN
    l2_bytes: int | None = None
    l2_bandwidth_bytes_per_s: int | None = None
    multiprocessors: int | None = None
    half_sizes: tuple[tuple[str, tuple[float, ...]], ...] = GPU_HALF_SIZES
    launches_ns: tuple[tuple[str, int], ...] = ()
    blas_workspace_bytes: int | None = None
    node_link: str | None = None
    network_link: str | None = None
    compute_capability: str | None = None
    sustained_clock_ratio: float = 1.0

    @property
    def host_rates(self) -> tuple[int, int] | None:
        """Bytes per second that copies to the host and back reach; None if not known."""
        nominal = self.host_bandwidth_bytes_per_s
        reached = None if nominal is None else int(HOST_SHARE * nominal)
        out, back = self.to_host_bytes_per_s or reached, self.from_host_bytes_per_s or reached
        return None if out is None or back is None else (out, back)

    def rate(self, dtype: str) -> int:
        """Dense operations per second in `dtype`; if the device states none, those of the wider type that it runs in instead."""
        rates = dict(self.flops_per_s)
        while dtype not in rates:
            dtype = _FALLBACK.get(dtype, "float32")
        return rates[dtype]
