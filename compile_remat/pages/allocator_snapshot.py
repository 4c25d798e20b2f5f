"""A predicted training step as a snapshot of the allocator, which torch's viewer (pytorch.org/memory_viz) opens.

The format is that of ``torch.cuda.memory._snapshot()``, described beside its types in ``torch/csrc/cuda/memory_snapshot.cpp`` and
"Understanding CUDA Memory Usage" in torch's documentation: segments, and for each device a list of events.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from compile_remat._util.atomic_write import write_atomically
from compile_remat.pages.figures import Kind, PageFigures, StepFigures, Tensor

ALIGNMENT_BYTES = 512
"""Addresses are multiples of this number of bytes, as in the allocator (``kMinBlockSize``); sizes are the plan's own."""

FIRST_ADDRESS = 0x7F0000000000


def memory_snapshot(figures: PageFigures) -> dict[str, Any]:
    """Returns the allocations and frees of the plan, node by node, and one segment with the buffers that are live at the end.

    Each buffer has its own address, by which the viewer tells buffers apart.

    Raises:
        ValueError: The tensors of the plan are unknown.
    """
    step = figures.known_step()
    sizes = (-(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in step.tensors)
    *addresses, workspace = accumulate(sizes, initial=FIRST_ADDRESS)
    end = workspace + max(step.live_bytes)
    segment = _event("segment_alloc", FIRST_ADDRESS, end - FIRST_ADDRESS, 0, [])
    return {
        "segments": [_segment(step, addresses, end)],
        "device_traces": [[segment, *_events(step, addresses, workspace)]],
        "allocator_settings": {},
        "external_annotations": [],
    }


def write_snapshot(figures: PageFigures, path: str | os.PathLike[str]) -> None:
    """Write the snapshot as a pickle, as torch does; raises OSError if that fails, and ValueError as `memory_snapshot`."""
    write_atomically(Path(path), pickle.dumps(memory_snapshot(figures)))


def _segment(step: StepFigures, addresses: Sequence[int], end: int) -> dict[str, Any]:
    last = len(step.columns) - 1
    blocks, at, live_bytes = list[dict[str, Any]](), FIRST_ADDRESS, 0
    for tensor, address in zip(step.tensors, addresses, strict=True):
        if tensor.end < last:
            continue
        blocks += [_block(at, address - at, None)] * (address > at)
        blocks.append(_block(address, tensor.nbytes, tensor))
        at, live_bytes = address + tensor.nbytes, live_bytes + tensor.nbytes
    blocks += [_block(at, end - at, None)] * (end > at)
    return {
        "device": 0,
        "address": FIRST_ADDRESS,
        "total_size": end - FIRST_ADDRESS,
        "allocated_size": live_bytes,
        "active_size": live_bytes,
        "requested_size": live_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def _events(step: StepFigures, addresses: Sequence[int], workspace: int) -> Iterator[dict[str, Any]]:
    begins, ends = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for k, tensor in enumerate(step.tensors):
        begins[tensor.begin].append(k)
        ends[tensor.end].append(k)
    known_bytes, last = 0, len(step.columns) - 1
    for column, (name, start_ns, live_bytes) in enumerate(
        zip(step.columns, step.starts_ns, step.live_bytes, strict=True)
    ):
        for k in begins[column]:
            tensor = step.tensors[k]
            known_bytes += tensor.nbytes
            yield _event("alloc", addresses[k], tensor.nbytes, start_ns, _frames(tensor))
        if live_bytes > known_bytes:
            frames = [{"name": f"workspace of {name}", "filename": "", "line": 0}]
            yield _event("alloc", workspace, live_bytes - known_bytes, start_ns, frames)
            yield from _freed(workspace, live_bytes - known_bytes, start_ns, frames)
        for k in ends[column] if column < last else ():
            tensor = step.tensors[k]
            known_bytes -= tensor.nbytes
            yield from _freed(addresses[k], tensor.nbytes, start_ns, _frames(tensor))


def _freed(address: int, nbytes: int, time_ns: int, frames: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for action in ("free_requested", "free_completed"):
        yield _event(action, address, nbytes, time_ns, frames)


def _event(action: str, address: int, nbytes: int, time_ns: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": nbytes,
        "stream": 0,
        "time_us": time_ns // 1000,
        "frames": frames,
    }


def _block(address: int, nbytes: int, tensor: Tensor | None) -> dict[str, Any]:
    return {
        "address": address,
        "size": nbytes,
        "requested_size": nbytes,
        "state": "inactive" if tensor is None else "active_allocated",
        "frames": [] if tensor is None else _frames(tensor),
    }


def _frames(tensor: Tensor) -> list[dict[str, Any]]:
    """Returns the stack frames that the viewer shows: the tensor, and the source line that computes it."""
    shape = f"{tensor.dtype}{list(tensor.shape)}"
    kind = "" if tensor.kind is Kind.TEMPORARY else f"{tensor.kind}: "
    top = {"name": f"{tensor.name} {shape} ({kind}{tensor.fate})", "filename": tensor.module_path, "line": 0}
    filename, _, line = tensor.source_line.rpartition(":")
    source = {"name": tensor.module_path or "model", "filename": filename, "line": int(line) if line.isdigit() else 0}
    return [top, source] if tensor.source_line else [top]
