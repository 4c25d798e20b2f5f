"""The tests that run, their shards, and the figures that `tests/durations.txt` keeps of earlier runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations
from tests.cpu_time import CpuTime
from tests.durations import NEVER, Durations, FileRow, Run, shards, write
from tests.selection import CpuTimes, is_left_out

A, B = "tests/test_api.py", "tests/test_docs.py"
TODAY = "2026-11-27"


def took(seconds: float) -> CpuTime:
    return CpuTime(seconds, 0.0)


KNOWN = Durations(
    {A: FileRow(took(10), 3, "2026-11-01"), B: FileRow(took(4), 2, "2026-11-02")},
    {f"{A}::test_one": took(6), f"{A}::test_two": took(3), f"{B}::test_one": took(3)},
)
"""All of the first file but a second have a row."""


def run_of(spent: dict[str, float], *, is_full: bool = True, collected: frozenset[str] | None = None) -> Run:
    found = frozenset(spent)
    return Run(
        {name: took(s) for name, s in spent.items()}, found, found if collected is None else collected, is_full, TODAY
    )


def rounded(found: Durations) -> Durations:
    return Durations(
        {path: dataclasses.replace(row, spent=took(round(row.spent.total_s, 6))) for path, row in found.files.items()},
        found.rows,
    )


@pytest.mark.parametrize(
    ("marks", "seconds", "expected"),
    [([], 0.0, False), ([], 2.0, False), ([], 2.1, True), (["proof"], 60.0, False), (["full"], 0.0, True)],
)
def test_what_takes_long_and_is_no_proof_is_left_out(marks: list[str], seconds: float, expected: bool) -> None:
    assert is_left_out(marks, seconds) is expected


def test_a_shared_fixture_counts_for_each_test_that_needs_it() -> None:
    rows = {f"{A}::test_one": took(1), f"{A}: ranks": took(30), f"{B}: ranks": took(50)}
    known = Durations({A: FileRow(took(31)), B: FileRow(took(50))}, rows)
    assert known.seconds(f"{A}::test_one", ["tmp_path", "ranks"]) == 31
    assert known.seconds(f"{A}::test_one") == 1
    tests = {f"{A}::test_one": ["ranks"], f"{A}::test_two": ["ranks"]}
    assert known.seconds_of_all(tests) == 31


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_each_file_is_in_one_shard_and_shards_take_about_as_long(count: int) -> None:
    seconds = {f"tests/test_{k}.py": 1.0 + k * k % 97 for k in range(60)}
    known = Durations({path: FileRow(took(s)) for path, s in seconds.items()}, {})
    paths = [*seconds, "tests/test_new.py"]
    found = shards(paths, known, count)
    assert len(found) == count
    assert sorted(path for shard in found for path in shard) == sorted(paths)
    assert found == shards(reversed(paths), known, count)
    sums = [sum(seconds.get(path, 1.0) for path in shard) for shard in found]
    assert max(sums) - min(sums) <= max(seconds.values()) / 4


def test_what_a_run_did_not_measure_stays() -> None:
    found = KNOWN.after(run_of({f"{A}::test_two": 8.0}, collected=frozenset()))
    assert found.rows == {**KNOWN.rows, f"{A}::test_two": took(8)}
    assert found.files == {A: FileRow(took(15), 3, "2026-11-01"), B: KNOWN.files[B]}


def test_a_test_that_became_short_has_no_row() -> None:
    found = KNOWN.after(run_of({f"{A}::test_two": 0.2}, collected=frozenset()))
    assert f"{A}::test_two" not in found.rows
    assert found.files[A].spent.total_s == pytest.approx(7.0)  # the short ones took a second before


def test_a_full_run_of_a_file_replaces_it() -> None:
    spent = {f"{A}::test_one": 5.0, f"{A}::test_new": 1.0, f"{A}::test_short": 0.25, f"{A}: ranks": 2.0}
    run = run_of(spent, collected=frozenset(name for name in spent if "::" in name))
    found = KNOWN.after(run)
    assert found.rows == {
        f"{A}::test_one": took(5),
        f"{A}::test_new": took(1),
        f"{A}: ranks": took(2),
        f"{B}::test_one": took(3),
    }
    assert found.files == {A: FileRow(took(8.25), 3, TODAY), B: KNOWN.files[B]}


@pytest.mark.parametrize("is_full", [False, True])
def test_a_day_is_that_of_a_full_run_of_all_tests_of_the_file(is_full: bool) -> None:
    collected = frozenset({f"{A}::test_one", f"{A}::test_two"})
    some = run_of({f"{A}::test_one": 6.0}, collected=collected)
    assert KNOWN.after(some).files[A].day == "2026-11-01"
    assert f"{A}::test_two" in KNOWN.after(some).rows
    every = dataclasses.replace(some, finished=collected, is_full=is_full)  # one was skipped
    assert KNOWN.after(every).files[A].day == (TODAY if is_full else "2026-11-01")
    assert f"{A}::test_two" in KNOWN.after(every).rows
    assert Durations().after(some).files[A].day == NEVER


def test_the_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "durations.txt"
    file.write_text(KNOWN.as_text())
    assert Durations.read(file) == KNOWN
    assert "5 tests: 0.2 CPU minutes" in KNOWN.as_text() and "2026-11-01 to 2026-11-02" in KNOWN.as_text()


def test_shards_are_written_when_all_of_them_have_run(tmp_path: Path) -> None:
    """Until then the file stays: it says how the tests are cut."""
    beside = "tests/test_api_2.py"  # in no shard: the run was one of some folders
    for path in (A, B, beside):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    file = tmp_path / "tests" / "durations.txt"
    gone = "tests/test_gone.py"
    more = {path: FileRow(took(1), 1) for path in (gone, beside)}
    known = Durations({**KNOWN.files, **more}, {**KNOWN.rows, **{f"{path}::test_one": took(1) for path in more}})
    file.write_text(known.as_text())
    write(run_of({f"{B}::test_one": 9.0}), (2, 2), file)
    assert file.read_text() == known.as_text()
    write(run_of({f"{A}::test_one": 7.0}), (1, 2), file)
    found = Durations.read(file)
    assert found.rows == {f"{A}::test_one": took(7), f"{B}::test_one": took(9), f"{beside}::test_one": took(1)}
    assert {path: row.day for path, row in found.files.items()} == {A: TODAY, B: TODAY, beside: NEVER}
    assert [path.name for path in file.parent.glob("durations*")] == [file.name]


@pytest.mark.parametrize("is_worker", [False, True])
def test_a_process_of_xdist_writes_nothing(is_worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has seen a part of a shard; if two of them wrote, only the second one's part would remain."""
    written: list[Run] = []
    monkeypatch.setattr(durations, "write", lambda run, shard: written.append(run))
    config: Any = SimpleNamespace(option=SimpleNamespace(full=True), args=[], getoption=lambda name: True)
    if is_worker:
        config.workerinput = {}
    CpuTimes(config, KNOWN).pytest_terminal_summary(SimpleNamespace(write_line=lambda line: None))
    assert len(written) == (0 if is_worker else 1)
