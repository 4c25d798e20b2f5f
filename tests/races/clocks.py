"""Happens-before by vector clocks: which accesses of a step no wait puts in order.

A trace has the events of a step in the order in which Python issued them.  An agent is a stream of kernels, a copy engine or the
host; its own events follow each other, and an event begins behind what the host had waited for when it issued the event.  A wait
puts whatever its agent does later behind a mark, a point in the work of another agent.  Nothing else is in order.  Two accesses of
the same bytes by two agents, of which one writes, are a race unless one of them happens before the other.

Memory that is taken and memory that is freed count as written by the stream that it belongs to: the allocator hands a freed block
to the next kernel of that stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

HOST = "host"
"""The agent that issues all events."""


@dataclass(frozen=True)
class Access:
    """Bytes that an agent reads or writes.

    Attributes:
        storage: A number that no other storage of the trace has.
        first, end: The first byte in the storage, and the first byte behind.
    """

    agent: str
    label: str
    storage: int
    first: int
    end: int
    writes: bool

    def meets(self, other: Access) -> bool:
        """Returns whether two accesses of one storage have to be in order."""
        return (self.writes or other.writes) and self.first < other.end and other.first < self.end


@dataclass(frozen=True)
class Mark:
    """A point in an agent's work, by the number of the mark."""

    agent: str
    number: int


@dataclass(frozen=True)
class Wait:
    """The agent's later events begin behind a mark.

    Attributes:
        kind: Says which part of the product asked for it.
        number: The number of the wait in its trace.
    """

    agent: str
    mark: int
    kind: str
    number: int


Event = Access | Mark | Wait
Clock = dict[str, int]


@dataclass(frozen=True)
class Race:
    """Two accesses in no order; Python issued `before` first."""

    before: Access
    after: Access

    def __str__(self) -> str:
        return f"{_text(self.before)} and {_text(self.after)} are in no order"


def _text(access: Access) -> str:
    verb = "writes" if access.writes else "reads"
    where = f"bytes {access.first} to {access.end} of storage {access.storage}"
    return f"{access.label} of {access.agent} {verb} {where}"


def races(trace: Sequence[Event], without: Collection[int] = ()) -> Iterator[Race]:
    """Yields the races of a trace.

    Args:
        without: Numbers of waits that are left out.
    """
    agents: defaultdict[int, set[str]] = defaultdict(set)
    for event in trace:
        if isinstance(event, Access):
            agents[event.storage].add(event.agent)
    earlier: defaultdict[int, list[tuple[Access, int]]] = defaultdict(list)
    for event, clock in _clocks(trace, without):
        if len(agents[event.storage]) == 1:
            continue
        for access, time in earlier[event.storage]:
            if access.agent != event.agent and clock.get(access.agent, 0) < time and access.meets(event):
                yield Race(access, event)
        earlier[event.storage].append((event, clock[event.agent]))


def has_race(trace: Sequence[Event], without: Collection[int] = ()) -> bool:
    """Returns whether a trace has a race; see `races`."""
    return any(True for _ in races(trace, without))


def _clocks(trace: Sequence[Event], without: Collection[int]) -> Iterator[tuple[Access, Clock]]:
    """Yields each access with its agent's clock: how much of each agent's work happened before it."""
    clocks: defaultdict[str, Clock] = defaultdict(dict)
    marks: dict[int, Clock] = {}
    for event in trace:
        own = clocks[event.agent]
        _join(own, clocks[HOST])
        match event:
            case Access():
                own[event.agent] = own.get(event.agent, 0) + 1
                yield event, own
            case Mark():
                marks[event.number] = dict(own)
            case Wait() if event.number not in without:
                _join(own, marks[event.mark])


def _join(clock: Clock, other: Clock) -> None:
    for agent, time in other.items():
        clock[agent] = max(clock.get(agent, 0), time)


def waits(trace: Sequence[Event]) -> list[Wait]:
    """The waits of a trace, in order."""
    return [event for event in trace if isinstance(event, Wait)]
