"""CPU seconds of each test, children included: unlike wall clock, they hardly depend on what else the machine does.

`tests/durations.txt` holds those of the last `make durations`. Tests that took long there start first, so that all workers end
at about the same time, and one that takes much longer than it says is named at the end of a run.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "durations.txt"
LONG_S = 5.0
"""Tests that take longer start first."""
SHORT_S = 0.5
"""Tests that take less are not listed one by one."""


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


def so_far() -> CpuTime:
    """Of this process, since it started."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return CpuTime(*(usage.ru_utime + usage.ru_stime for usage in usages))


class CpuTimes:
    """Plugin that measures each phase of each test, in the process that runs it, and sums them up in the one that reports."""

    def __init__(self, committed_s: Mapping[str, float], write_to: Path | None = None) -> None:
        self._committed_s, self._write_to = committed_s, write_to
        self._start = ZERO
        self._seen: dict[str, CpuTime] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start = so_far()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: Any = yield
        now = so_far()
        spent, self._start = now - self._start, now
        report.cpu_s = (spent.own_s, spent.children_s)  # numbers alone: pytest-xdist sends them to the first process
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seen[report.nodeid] = self._seen.get(report.nodeid, ZERO) + CpuTime(*report.cpu_s)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = sum(self._seen.values(), ZERO)
        terminalreporter.write_line(
            f"tests took {total.total_s:.0f} CPU seconds, {total.children_s:.0f} of it in children"
        )
        for test, spent in self._seen.items():
            if spent.total_s > 2 * max(LONG_S, self._committed_s.get(test, 0.0)):
                terminalreporter.write_line(f"{spent.total_s:.0f} CPU seconds, more than {FILE.name} says: {test}")
        if self._write_to is not None:
            self._write_to.write_text(as_text(self._seen))


def as_text(seen: Mapping[str, CpuTime]) -> str:
    """The table: a line for the total, for each folder or file directly below tests/, and for each test that is not short."""
    groups: Counter[str] = Counter()
    for test, spent in seen.items():
        groups[test.split("::")[0].split("/")[1]] += spent.total_s  # type: ignore[assignment]
    total = sum(seen.values(), ZERO)
    lines = [
        "# CPU seconds, and those of them in children (compilers, processes): `make durations` writes this file.",
        f"# {len(seen):,} tests: {total.total_s / 60:.1f} CPU minutes, {total.children_s / 60:.1f} in children.",
        *(f"# {seconds:7.0f}  {group}" for group, seconds in groups.most_common()),
    ]
    longest = sorted(seen.items(), key=lambda item: (-round(item[1].total_s, 1), item[0]))
    lines += [f"{s.total_s:7.1f} {s.children_s:7.1f}  {test}" for test, s in longest if s.total_s >= SHORT_S]
    return "\n".join(lines) + "\n"


def committed_s() -> dict[str, float]:
    """CPU seconds of the tests that `tests/durations.txt` lists."""
    if not FILE.exists():
        return {}
    rows = [line.split(maxsplit=2) for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {test: float(total) for total, _, test in rows}


def longest_first(items: list[pytest.Item], committed: Mapping[str, float]) -> None:
    """Move long tests to the front, the longest first; the others stay in order."""
    seconds = {item: committed.get(item.nodeid, 0.0) for item in items}
    items.sort(key=lambda item: -seconds[item] if seconds[item] > LONG_S else 0.0)
