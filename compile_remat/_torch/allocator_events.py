"""Requests to torch's allocator: single allocations and frees on the CPU, and the peak bytes of one call.

Private names of torch, same in 2.11 to 2.15: ``torch._C._profiler._EventType`` and the `experimental_event_tree` of a profile;
``torch.autograd._enable_profiler_legacy`` and ``_disable_profiler_legacy``, which see the CPU allocations of this thread
alone and print nothing, and ``_profiler_enabled``.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import profile

from compile_remat._torch.version import private_name

_AUTOGRAD, _PROFILER = "torch.autograd", "torch._C._profiler"
ProfilerConfig = private_name(_AUTOGRAD, "ProfilerConfig")
ProfilerState = private_name(_AUTOGRAD, "ProfilerState")
enable_profiler = private_name(_AUTOGRAD, "_enable_profiler_legacy")
disable_profiler = private_name(_AUTOGRAD, "_disable_profiler_legacy")
is_profiled = private_name(_AUTOGRAD, "_profiler_enabled")
ExperimentalConfig = private_name(_PROFILER, "_ExperimentalConfig")


@dataclass(frozen=True)
class AllocationEvent:
    """One call of the allocator: `nbytes` is negative for a free."""

    time_ns: int
    nbytes: int
    address: int


def cpu_allocation_events(profiler: profile) -> list[AllocationEvent]:
    """All allocations and frees of c10's CPU allocator in a finished profile, in time order.

    `torch.profiler` shows them publicly only as sums per operator; the single events are in its event tree.
    """
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    pending: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    events = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            events.append(AllocationEvent(event.start_time_ns, fields.alloc_size, fields.ptr))
    return sorted(events, key=lambda event: event.time_ns)


def most_allocated(run: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Returns the peak bytes that `run` allocates beyond those allocated before it, and its result.

    On a CPU `run` gets a thread of its own if this thread is profiled already: torch has one profiler per thread.
    On CUDA `run` is called twice, because a library's first call allocates a workspace for the whole process, which belongs to no
    single call.  Requested bytes are counted, before the allocator rounds them.  The allocator's peak statistics are reset.
    """
    if device.type == "cuda":
        return _on_cuda(run, device)
    if not is_profiled():
        return _on_cpu(run)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)) as executor:
        return executor.submit(_on_cpu, run).result()


def _on_cpu(run: Callable[[], Any]) -> tuple[int, Any]:
    # input shapes, memory, stacks, flops, modules
    enable_profiler(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, ExperimentalConfig()))
    try:
        result = run()
    finally:
        records = disable_profiler()
    events = [event.cpu_memory_usage() for thread in records for event in thread if event.kind() == "memory_alloc"]
    return max(accumulate(events, initial=0)), result


def _on_cuda(run: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    result = run()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before, result
