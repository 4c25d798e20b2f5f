"""CPU seconds of each test, children included: unlike wall clock, they hardly depend on what else the machine does."""

from __future__ import annotations

import resource
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuTime:
    """User and system seconds of a process and of its children that have ended (compilers, mostly)."""

    own_s: float
    children_s: float

    @property
    def total_s(self) -> float:
        return self.own_s + self.children_s

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.own_s + other.own_s, self.children_s + other.children_s)

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.own_s - other.own_s, self.children_s - other.children_s)


ZERO = CpuTime(0.0, 0.0)

RUNNING: dict[int, CpuTime] = {}
"""CPU times that running children have reported, by process id: the system counts a child only when it has ended."""


def so_far() -> CpuTime:
    """CPU time of this process since it started."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own_s, ended_s = (usage.ru_utime + usage.ru_stime for usage in usages)
    return CpuTime(own_s, ended_s + sum(spent.total_s for spent in RUNNING.values()))
