"""`tests/durations.txt`: CPU seconds of each test, which choose the tests of `make test`, their order, and the shards.

A test that takes more than `LIMIT_S` is for `make test-full`, unless it is marked `proof`; one that the file does not list runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cpu_time import ZERO, CpuTime

FILE = Path(__file__).parent / "durations.txt"
LIMIT_S = 2.0
"""`make test` leaves out tests that take longer."""
LONG_S = 5.0
"""Tests that take longer start first."""
SHORT_S = 0.5
"""Tests that take less are not listed one by one."""
NEVER = "never"

FILES = "# Seconds, in children, tests, the day when all of them last ran with --full, file."
ROWS = f"# Seconds and those in children of what takes {SHORT_S:g} s or more; a fixture that tests share stands behind a colon."


@dataclass(frozen=True)
class FileRow:
    """CPU time of all tests of a file with the fixtures that they share, their number, and the day when all of them last ran."""

    spent: CpuTime = ZERO
    num_tests: int = 0
    day: str = NEVER


@dataclass(frozen=True)
class Run:
    """Measurements of one run of tests.

    Attributes:
        spent: CPU time by test and by shared fixture, if the test or fixture ran to its end.
        finished: Tests with any result: skipped and failed ones as well.
        collected: Tests that were found; empty if only some tests of a file were asked for.
        is_full: True if the run had `--full`.
        day: Day of the run.
    """

    spent: Mapping[str, CpuTime]
    finished: frozenset[str]
    collected: frozenset[str]
    is_full: bool
    day: str


@dataclass(frozen=True)
class Durations:
    """CPU times: of files by path, and of tests and shared fixtures by name if at least `SHORT_S`."""

    files: Mapping[str, FileRow] = field(default_factory=dict)
    rows: Mapping[str, CpuTime] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path = FILE) -> Durations:
        """Returns the figures that `as_text` wrote."""
        lines = file.read_text().splitlines()
        middle = lines.index(ROWS)
        files = [line.split(maxsplit=4) for line in lines[:middle] if not line.startswith("#")]
        rows = [line.split(maxsplit=2) for line in lines[middle + 1 :]]
        return cls(
            {path: FileRow(_time(total, children), int(num), day) for total, children, num, day, path in files},
            {name: _time(total, children) for total, children, name in rows},
        )

    def as_text(self) -> str:
        """Returns a line for each file and for each row, the longest first."""
        total = _sum(row.spent for row in self.files.values())
        days = sorted((row.day for row in self.files.values()), key=lambda day: (day != NEVER, day))
        lines = [
            "# CPU seconds of tests, and those of them in children (compilers, processes): `make durations` writes this file.",
            f"# {sum(row.num_tests for row in self.files.values()):,} tests: {total.total_s / 60:.1f} CPU minutes, "
            f"{total.children_s / 60:.1f} in children. Last full run, by file: {days[0]} to {days[-1]}.",
            FILES,
        ]
        by_file = sorted(self.files.items(), key=lambda item: _order(item[1].spent, item[0]))
        lines += [f"{_columns(row.spent)} {row.num_tests:5}  {row.day:10}  {path}" for path, row in by_file]
        by_row = sorted(self.rows.items(), key=lambda item: _order(item[1], item[0]))
        lines += [ROWS, *(f"{_columns(spent)}  {name}" for name, spent in by_row)]
        return "\n".join(lines) + "\n"

    def seconds(self, test: str, fixtures: Iterable[str] = ()) -> float:
        """Returns the seconds of a test with its fixtures, as far as they are shared."""
        return _sum(self.rows.get(name, ZERO) for name in _with_fixtures(test, fixtures)).total_s

    def seconds_of_all(self, tests: Mapping[str, Iterable[str]]) -> float:
        """Returns what a run of these tests, given with their fixtures, takes; one short test of a file stands for all."""
        names = {name for test, fixtures in tests.items() for name in _with_fixtures(test, fixtures)}
        rows = _by_file(self.rows)
        short = _sum(self._short(path, rows[path]) for path in {file_of(test) for test in tests})
        return short.total_s + _sum(spent for name, spent in self.rows.items() if name in names).total_s

    def after(self, run: Run) -> Durations:
        """Returns the figures after a run. Figures that it did not measure stay; tests and files that no longer exist go."""
        files, rows = dict(self.files), dict(self.rows)
        by_file, measured, collected = _by_file(self.rows), _by_file(run.spent), _by_file(run.collected)
        for path in sorted({*measured, *collected}):
            old, before, found = files.get(path, FileRow()), by_file[path], set(collected[path])
            known = {name: rows.pop(name) for name in before}
            took = {name: run.spent[name] for name in measured[path]}
            is_whole = run.is_full and bool(found) and run.finished >= found
            gone = {name for name in known if found and name not in found and (is_whole or "::" in name)}
            listed = {**{name: known[name] for name in known if name not in gone}, **took}
            short = _sum(spent for spent in took.values() if spent.total_s < SHORT_S)
            if not is_whole:  # a part of the tests cannot tell that the others take less by now
                short = max(short, self._short(path, before), key=lambda spent: spent.total_s)
            rows |= {name: spent for name, spent in listed.items() if spent.total_s >= SHORT_S}
            spent = short + _sum(spent for spent in listed.values() if spent.total_s >= SHORT_S)
            files[path] = FileRow(spent, len(found) or old.num_tests, run.day if is_whole else old.day)
        return Durations(files, rows)

    def only(self, paths: Iterable[str]) -> Durations:
        """Returns the figures of these files."""
        kept = set(paths)
        files = {path: row for path, row in self.files.items() if path in kept}
        return Durations(files, {name: spent for name, spent in self.rows.items() if file_of(name) in kept})

    def _short(self, path: str, rows: Iterable[str]) -> CpuTime:
        """CPU time of the tests of a file that have no row."""
        return self.files.get(path, FileRow()).spent - _sum(self.rows[name] for name in rows)


def shards(paths: Iterable[str], durations: Durations, count: int) -> list[list[str]]:
    """Returns the files of each of `count` shards that take about as long: each file goes to the one that takes least so far.

    Files stay whole, since tests share fixtures.
    """
    unknown = FileRow(CpuTime(1.0, 0.0))
    spent = {path: durations.files.get(path, unknown).spent.total_s for path in paths}
    found: list[list[str]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for path in sorted(spent, key=lambda path: (-spent[path], path)):
        least = sums.index(min(sums))
        found[least].append(path)
        sums[least] += spent[path]
    return found


def write(run: Run, shard: tuple[int, int] | None, file: Path = FILE) -> None:
    """Write the figures after a run.

    The figures of a shard lie beside the file until all shards have run: in the file, they would change the files of other shards.
    """
    found = Durations.read(file).after(run)
    if shard is not None:
        number, count = shard
        parts = [file.with_name(f"{file.stem}.{k}-of-{count}{file.suffix}") for k in range(1, count + 1)]
        parts[number - 1].write_text(found.only({file_of(name) for name in run.collected}).as_text())
        if not all(part.exists() for part in parts):
            return
        for part in map(Durations.read, parts):
            others = found.only(found.files.keys() - part.files.keys())
            found = Durations({**others.files, **part.files}, {**others.rows, **part.rows})
        for part in parts:
            part.unlink()
    there = [path for path in found.files if (file.parent.parent / path).exists()]
    file.write_text(found.only(there).as_text())


def file_of(name: str) -> str:
    """Returns the file of a test, or of a row of a fixture."""
    return name.split("::")[0].split(": ")[0]


def _with_fixtures(test: str, fixtures: Iterable[str]) -> list[str]:
    return [test, *(f"{file_of(test)}: {fixture}" for fixture in fixtures)]


def _by_file(names: Iterable[str]) -> defaultdict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        found[file_of(name)].append(name)
    return found


def _sum(times: Iterable[CpuTime]) -> CpuTime:
    return sum(times, ZERO)


def _time(total: str, children: str) -> CpuTime:
    return CpuTime(float(total) - float(children), float(children))


def _columns(spent: CpuTime) -> str:
    return f"{spent.total_s:7.1f} {spent.children_s:7.1f}"


def _order(spent: CpuTime, name: str) -> tuple[float, str]:
    return -round(spent.total_s, 1), name
