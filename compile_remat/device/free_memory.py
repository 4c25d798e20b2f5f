"""What `auto` stands for: how many bytes the compiled graphs may take on a device, beside what is there already."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_remat._torch.ranks.wrappers import local_nbytes
from compile_remat._util.host import host_free_bytes
from compile_remat._util.units import format_bytes
from compile_remat.budget import Reserve

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


def read(device: torch.device, capacity_bytes: int | None = None) -> Free | None:
    """The device's memory now; None where it is not known: on a CPU without a given capacity, and on other devices.

    Args:
        capacity_bytes: What this process may hold, where the user says so.  Without it a GPU's own capacity counts.  On a CPU
            the process holds what is resident: tensors and everything else.
    """
    if device.type == "cpu" and capacity_bytes is not None:
        resident, free = resident_bytes(), host_free_bytes()
        if resident is None or free is None:
            return None
        return Free(free, resident, resident, capacity_bytes, capacity_bytes)
    if device.type != "cuda":
        return None
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    free, capacity = torch.cuda.mem_get_info(device)
    limit = int(capacity * torch.cuda.get_per_process_memory_fraction(device))
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    if capacity_bytes is not None:
        limit, capacity = min(limit, capacity_bytes), min(capacity, capacity_bytes)
    return Free(free, reserved, allocated, capacity, limit)


def free_bytes(device: torch.device, capacity_bytes: int | None = None) -> int | None:
    """What this process can still allocate there; None where that is not known."""
    memory = read(device, capacity_bytes)
    return None if memory is None else memory.available


def has_expandable_segments() -> bool:
    """Whether torch's CUDA allocator is asked for ``expandable_segments``."""
    options = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return re.search(r"expandable_segments\s*:\s*True", options, re.IGNORECASE) is not None


def resident_bytes(table: Path = Path("/proc/self/statm")) -> int | None:
    """What this process holds of the host's memory; None where the system does not say."""
    if not table.exists():
        return None
    return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BLAS_HANDLES = 2
"""Threads that multiply matrices in a step, each with a handle of its own: the user's, in the forward, and autograd's."""


def blas_bytes(workspace_bytes: int | None) -> int:
    """What cuBLAS takes of a process for good, from its first product on.

    Args:
        workspace_bytes: Of one handle on this device, unless ``CUBLAS_WORKSPACE_CONFIG`` asks for another size; None: nothing.
    """
    if workspace_bytes is None:
        return 0
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return BLAS_HANDLES * (sum(int(kib) * 1024 * int(count) for kib, count in asked) or workspace_bytes)


def auto_budget_bytes(memory: Free, reserve: Reserve, others_bytes: int) -> int:
    """Bytes left for the region peak: what is free, less the reserve and what is still to come beside the graphs."""
    left = memory.available - reserve.of(memory.capacity) - others_bytes
    grain = max(1, memory.capacity // GRAIN)
    return max(1, left // grain * grain)  # nothing left: the lowest plan, and a warning


def largest_trainable_bytes(example_inputs: Sequence[Any]) -> int:
    """Bytes of the largest of these parameters."""
    return max((local_nbytes(t) for t in example_inputs if _is_trained(t)), default=0)


def trainable_bytes(example_inputs: Sequence[Any]) -> int:
    """Bytes of the parameters among a graph's inputs that require a gradient, of this rank's parts of them."""
    return sum(local_nbytes(t) for t in example_inputs if _is_trained(t))


def gradient_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the gradients that lie there of the parameters among these, of this rank's parts of them."""
    return sum(local_nbytes(t.grad) for t in tensors if _is_trained(t) and t.grad is not None)


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def describe(memory: Free | None, budget_bytes: int, gradient_bytes: int = 0) -> str:
    """The budget beside what is there already, for the first log line.

    Args:
        memory: The device's; None where it is not known.
        gradient_bytes: Of the trained parameters, where no gradients lie there yet.
    """
    text = f"budget {format_bytes(budget_bytes)}"
    if memory is not None:
        total = format_bytes(budget_bytes + memory.allocated)
        text += f" + {format_bytes(memory.allocated)} already allocated = {total} of {format_bytes(memory.capacity)}"
    if gradient_bytes:
        text += f"; gradients that an earlier micro-batch leaves come on top: {format_bytes(gradient_bytes)}"
    return text
