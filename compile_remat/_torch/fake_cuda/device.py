"""The properties of a CUDA device that torch, Inductor and Triton read."""

from __future__ import annotations

import types
from dataclasses import dataclass

FIRST_WITH_BFLOAT16 = (8, 0)


@dataclass(frozen=True)
class Limits:
    """Limits of a compute capability, from the table of technical specifications in CUDA's programming guide.

    Attributes:
        threads: Most threads of a multiprocessor.
        shared_bytes: Shared memory of a multiprocessor.
        block_bytes: Most shared memory of a block that opts in to more than 48 KiB.
    """

    threads: int
    shared_bytes: int
    block_bytes: int


LIMITS = {
    (7, 0): Limits(2048, 96 << 10, 96 << 10),
    (7, 5): Limits(1024, 64 << 10, 64 << 10),
    (8, 0): Limits(2048, 164 << 10, 163 << 10),
    (8, 6): Limits(1536, 100 << 10, 99 << 10),
    (8, 9): Limits(1536, 100 << 10, 99 << 10),
    (9, 0): Limits(2048, 228 << 10, 227 << 10),
    (10, 0): Limits(2048, 228 << 10, 227 << 10),
    (12, 0): Limits(1536, 100 << 10, 99 << 10),
}


@dataclass(frozen=True)
class FakeDevice:
    """One CUDA device.

    Attributes:
        capability: Compute capability, one of `LIMITS`.
        bandwidth_gbps: Bandwidth of device memory, in GB/s.
        tflops: Dense rate of bfloat16, or of float16 if there is no bfloat16, in TFLOP/s.
        float32_tflops: Dense rate of float32, in TFLOP/s.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int
    l2_bytes: int
    bandwidth_gbps: float
    tflops: float
    float32_tflops: float

    @property
    def limits(self) -> Limits:
        """The limits of its compute capability."""
        return LIMITS[self.capability]

    @property
    def has_bfloat16(self) -> bool:
        """True if its kernels compute in bfloat16; the device then has flash attention, too."""
        return self.capability >= FIRST_WITH_BFLOAT16

    def properties(self) -> types.SimpleNamespace:
        """Properties as ``torch.cuda.get_device_properties`` returns them.  Inductor splits reductions by the SM count."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            total_memory=self.memory_bytes,
            multi_processor_count=self.multiprocessors,
            is_integrated=False,
            is_multi_gpu_board=False,
            max_threads_per_multi_processor=self.limits.threads,
            max_threads_per_block=1024,
            warp_size=32,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.limits.block_bytes,
            shared_memory_per_multiprocessor=self.limits.shared_bytes,
            L2_cache_size=self.l2_bytes,
            gcnArchName="",
            clock_rate=1980000,
            memory_clock_rate=2619000,
            memory_bus_width=5120,
            uuid="fake",
        )


H100 = FakeDevice("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30, 132, 50 << 20, 3350, 989, 67)
"""An H100 SXM5."""
