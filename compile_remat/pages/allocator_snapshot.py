"""A predicted training step as a snapshot of the allocator, which torch's viewer (pytorch.org/memory_viz) opens.

The format is that of ``torch.cuda.memory._snapshot()``, described beside its types in ``torch/csrc/cuda/memory_snapshot.cpp`` and
"Understanding CUDA Memory Usage" in torch's documentation: segments, and for each device a list of events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from compile_remat.pages.figures import Kind, PageFigures, StepFigures, Tensor

ALIGNMENT_BYTES = 512
"""Addresses are multiples of this number of bytes, as in the allocator (``kMinBlockSize``); sizes are the plan's own."""

FIRST_ADDRESS = 0x7F0000000000


def memory_snapshot(figures: PageFigures, measured: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the allocations and frees of the plan, node by node, and one segment with the buffers.

    Each buffer has its own address, by which the viewer tells buffers apart; workspaces share the last address.  In the segment
    those are active that are live at the end.  The plan is the device after those of `measured`; the viewer shows one at a time.

    Args:
        measured: A snapshot of the allocator during a real step, as ``torch.cuda.memory._snapshot()`` returns it.

    Raises:
        ValueError: The tensors of the plan are unknown, or `measured` is no snapshot.
    """
    step = figures.known_step()
    sizes = (-(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in step.tensors)
    *addresses, workspace = accumulate(sizes, initial=FIRST_ADDRESS)
    end = workspace + max(step.live_bytes)
    segment = _event("segment_alloc", FIRST_ADDRESS, end - FIRST_ADDRESS, 0, [])
    trace = [segment, *_events(step, addresses, workspace)]
    empty: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}, "external_annotations": []}
    beside = empty if measured is None else measured
    if not isinstance(beside, dict) or not {"segments", "device_traces"} <= beside.keys():
        raise ValueError("measured is no snapshot: give what torch.cuda.memory._snapshot() returns")
    own = _segment(step, [*addresses, workspace, end], device=len(beside["device_traces"]))
    return {**beside, "segments": [*beside["segments"], own], "device_traces": [*beside["device_traces"], trace]}


def _segment(step: StepFigures, bounds: Sequence[int], device: int) -> dict[str, Any]:
    """Returns the segment with a block for each buffer, and one for workspaces, between two of the `bounds` each."""
    last = len(step.columns) - 1
    live_bytes = sum(t.nbytes for t in step.tensors if t.end == last)
    blocks = [
        {
            "address": begin,
            "size": end - begin,
            "requested_size": end - begin if tensor is None else tensor.nbytes,
            "state": "inactive" if tensor is None or tensor.end < last else "active_allocated",
            "frames": [] if tensor is None else _frames(tensor),
        }
        for tensor, (begin, end) in zip([*step.tensors, None], pairwise(bounds), strict=True)
    ]
    return {
        "device": device,
        "address": FIRST_ADDRESS,
        "total_size": bounds[-1] - FIRST_ADDRESS,
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
    fields = {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_ns // 1000}
    return {**fields, "frames": frames}


def _frames(tensor: Tensor) -> list[dict[str, Any]]:
    """Returns the stack frames that the viewer shows: the tensor, and the source line that computes it."""
    shape = f"{tensor.dtype}{list(tensor.shape)}"
    kind = "" if tensor.kind is Kind.TEMPORARY else f"{tensor.kind}: "
    top = {"name": f"{tensor.name} {shape} ({kind}{tensor.fate})", "filename": tensor.module_path, "line": 0}
    filename, _, line = tensor.source_line.rpartition(":")
    source = {"name": tensor.module_path or "model", "filename": filename, "line": int(line) if line.isdigit() else 0}
    return [top, source] if tensor.source_line else [top]
