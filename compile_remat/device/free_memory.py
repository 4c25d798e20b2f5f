"""Computes the budget of `auto`: the bytes that compiled graphs may take on a device, beside those already allocated there."""

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
from compile_remat._util.units import common_unit, format_bytes
from compile_remat.budget import Reserve

GRAIN = 64
"""The budget of `auto` is a multiple of 1 / `GRAIN` of the capacity, so that small differences do not change the plan."""


@dataclass(frozen=True)
class Free:
    """A device's memory at one moment, in bytes.

    Attributes:
        free: Free bytes by the driver's count.
        reserved: Bytes held by torch's allocator, in use or not; on a CPU, the process's resident bytes.
        allocated: Bytes in use by tensors; on a CPU, the process's resident bytes.
        capacity: All bytes of the device, or the given capacity.
        process_limit: The most bytes that this process may take.
    """

    free: int
    reserved: int
    allocated: int
    capacity: int
    process_limit: int

    @property
    def available(self) -> int:
        """Bytes that this process can still allocate."""
        return min(self.free + self.reserved, self.process_limit) - self.allocated


def read(device: torch.device, capacity_bytes: int | None = None) -> Free | None:
    """Returns the device's memory now; None if unknown: on a CPU without a given capacity, and on devices other than CPU and CUDA.

    Args:
        capacity_bytes: Bytes that this process may hold, given by the user; None for a GPU's own capacity.  On a CPU, all resident
            bytes of the process count, not only tensors.
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
    """Returns the bytes that this process can still allocate on the device; None if unknown."""
    memory = read(device, capacity_bytes)
    return None if memory is None else memory.available


def has_expandable_segments() -> bool:
    """Returns True if the environment asks torch's CUDA allocator for ``expandable_segments``."""
    options = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return re.search(r"expandable_segments\s*:\s*True", options, re.IGNORECASE) is not None


def resident_bytes(table: Path = Path("/proc/self/statm")) -> int | None:
    """Returns the resident bytes of this process; None if the system has no such table."""
    if not table.exists():
        return None
    return int(table.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BLAS_HANDLES = 2
"""Threads that call cuBLAS in a step, each with its own handle: the user's, in the forward, and autograd's."""


def blas_bytes(workspace_bytes: int | None) -> int:
    """Returns the bytes of the workspaces that cuBLAS keeps in a process from its first matrix product on.

    Args:
        workspace_bytes: Bytes of one handle on this device, unless ``CUBLAS_WORKSPACE_CONFIG`` asks for another size; None if the
            device has no such workspace.
    """
    if workspace_bytes is None:
        return 0
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return BLAS_HANDLES * (sum(int(kib) * 1024 * int(count) for kib, count in asked) or workspace_bytes)


def auto_budget_bytes(memory: Free, reserve: Reserve, others_bytes: int) -> int:
    """Returns the bytes left for the region peak: available bytes, less the reserve and `others_bytes` still to be allocated."""
    left = memory.available - reserve.of(memory.capacity) - others_bytes
    grain = max(1, memory.capacity // GRAIN)
    return max(1, left // grain * grain)  # 1 if nothing is left: then the lowest plan runs, with a warning


def largest_trainable_bytes(example_inputs: Sequence[Any]) -> int:
    """Returns the bytes of the largest parameter that requires a gradient, of this rank's part of it; 0 if there is none."""
    return max((local_nbytes(t) for t in example_inputs if _is_trained(t)), default=0)


def trainable_bytes(example_inputs: Sequence[Any]) -> int:
    """Returns the bytes of the parameters among a graph's inputs that require a gradient, of this rank's parts of them."""
    return sum(local_nbytes(t) for t in example_inputs if _is_trained(t))


def gradient_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of the gradients that the parameters among these tensors have now, of this rank's parts of them."""
    return sum(local_nbytes(t.grad) for t in tensors if _is_trained(t) and t.grad is not None)


def _is_trained(value: object) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def describe(memory: Free | None, budget_bytes: int, gradient_bytes: int = 0) -> str:
    """Returns the first log line: the budget beside the bytes already allocated.

    Args:
        memory: The device's memory; None if unknown.
        gradient_bytes: Bytes of the gradients that the trained parameters will get; 0 to leave them out.
    """
    text = f"budget {format_bytes(budget_bytes)}"
    if memory is not None:
        sizes = (budget_bytes, memory.allocated, budget_bytes + memory.allocated, memory.capacity)
        unit = common_unit(*sizes)
        budget, allocated, total, capacity = (format_bytes(nbytes, unit) for nbytes in sizes)
        text = f"budget {budget} + {allocated} already allocated = {total} of {capacity}"
    return text + on_top(gradient_bytes)


def on_top(gradient_bytes: int) -> str:
    """Returns the end of the first log line: the bytes of gradients that accumulate beside the graphs; empty for 0 bytes."""
    if not gradient_bytes:
        return ""
    return f"; gradients that an earlier micro-batch leaves come on top: {format_bytes(gradient_bytes)}"
