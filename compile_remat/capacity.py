"""What `auto` stands for: how many bytes the compiled graphs may take on a device, beside what is there already."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_remat.budget import OptimizerState, Reserve
from compile_remat.units import format_bytes

GRAIN = 64
"""`auto` is rounded down to this part of the capacity, so that small differences do not make another plan."""


@dataclass(frozen=True)
class Free:
    """A device's memory at one moment, in bytes.

    Attributes:
        free: Free by the driver's count.
        reserved: Held by torch's allocator, in use or not.
        allocated: In use by tensors.
        capacity: All of it.
        process_limit: The most that this process may take.
    """

    free: int
    reserved: int
    allocated: int
    capacity: int
    process_limit: int

    @property
    def available(self) -> int:
        """What this process can still allocate."""
        return min(self.free + self.reserved, self.process_limit) - self.allocated


def read(device: torch.device) -> Free | None:
    """The device's memory now; None where torch does not know it (CPU)."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    return Free(free, reserved, allocated, capacity, int(capacity * fraction))


def free_bytes(device: torch.device) -> int | None:
    """What this process can still allocate on an accelerator; None where torch does not know."""
    memory = read(device)
    return None if memory is None else memory.available


def host_free_bytes(table: Path = Path("/proc/meminfo")) -> int | None:
    """What the host can give without swapping; None where the system does not say."""
    if not table.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", table.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def auto_budget_bytes(
    memory: Free, reserve: Reserve, optimizer_state: OptimizerState, example_inputs: Sequence[Any]
) -> int:
    """Bytes left for the region peak: what is free, less the reserve and the optimizer's state still to come."""
    left = memory.available - reserve.of(memory.capacity)
    left -= optimizer_state.of(trainable_bytes(example_inputs))
    grain = max(1, memory.capacity // GRAIN)
    return max(1, left // grain * grain)  # nothing left: the lowest plan, and a warning


def trainable_bytes(example_inputs: Sequence[Any]) -> int:
    """Bytes of the parameters among a graph's inputs that require a gradient."""
    return sum(t.nbytes for t in example_inputs if isinstance(t, torch.nn.Parameter) and t.requires_grad)


def describe(memory: Free, budget_bytes: int) -> str:
    """The budget beside what is there already, for the first log line."""
    total = format_bytes(budget_bytes + memory.allocated)
    return (
        f"budget {format_bytes(budget_bytes)} + {format_bytes(memory.allocated)} already allocated = "
        f"{total} of {format_bytes(memory.capacity)}"
    )
