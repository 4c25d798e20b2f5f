"""Single allocations and frees of the CPU allocator, from a profile.

Private names of torch: ``torch._C._profiler._EventType`` and the `experimental_event_tree` of a profile, 2.11 to 2.15.
"""

from dataclasses import dataclass
from typing import Any

from torch.profiler import profile


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
