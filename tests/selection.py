"""Plugin of pytest: which tests run, in what order, and how many CPU seconds each of them takes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from tests import durations
from tests.cpu_time import ZERO, CpuTime, so_far
from tests.durations import LIMIT_S, LONG_S, Durations, Run, file_of

MORE_WITH_FULL = "is_full"
"""The fixture of tests that do more with `--full`: what they take then is not what they take in `make test`."""


def add_options(parser: pytest.Parser) -> None:
    """Adds the command-line options that this module reads."""
    parser.addoption("--full", action="store_true", help="the full product of cases, compilers and budgets (slow)")
    parser.addoption(
        "--shard", type=_shard, metavar="K/N", help="part K of N that take about as long; files stay whole"
    )
    parser.addoption("--write-durations", action="store_true", help=f"write CPU seconds to {durations.FILE.name}")


def select(config: pytest.Config, items: list[pytest.Item], known: Durations) -> None:
    """Keep the items of a shard, and skip what is left out; a test that is named by its id runs whatever it takes."""
    if config.getoption("--shard"):
        number, count = config.getoption("--shard")
        kept = set(durations.shards({file_of(item.nodeid) for item in items}, known, count)[number - 1])
        config.hook.pytest_deselected(items=[item for item in items if file_of(item.nodeid) not in kept])
        items[:] = [item for item in items if file_of(item.nodeid) in kept]
    if not config.getoption("--full"):
        are_named = _are_named(config)
        for item in items:
            seconds = 0.0 if are_named else known.seconds(item.nodeid, _fixtures(item))
            if is_left_out({mark.name for mark in item.iter_markers()}, seconds):
                item.add_marker(pytest.mark.skip(reason="runs with --full: `make test-full`"))


def is_left_out(marks: Collection[str], seconds: float) -> bool:
    """Returns whether a test is for `make test-full`: it is marked so, or it takes long and is no proof."""
    return "full" in marks or (seconds > LIMIT_S and "proof" not in marks)


def longest_first(items: list[pytest.Item], known: Durations) -> None:
    """Move long tests to the front, the longest first, so that all workers end at about the same time; the others stay in order."""
    seconds = {item: known.seconds(item.nodeid) for item in items}
    items.sort(key=lambda item: -seconds[item] if seconds[item] > LONG_S else 0.0)


class CpuTimes:
    """Measures each phase of each test, in the process that runs it, and sums them up in the one that reports.

    A fixture that several tests share counts by itself: which of them comes first is chance.
    """

    def __init__(self, config: pytest.Config, known: Durations) -> None:
        self._config, self._known = config, known
        self._start, self._shared = ZERO, dict[str, CpuTime]()
        self._collected: Sequence[str] = ()
        self._seen, self._measured, self._finished = dict[str, CpuTime](), set[str](), set[str]()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected = self._collected or [item.nodeid for item in session.items]
        if self._config.getoption("collectonly"):
            run = {item.nodeid: _fixtures(item) for item in session.items if not item.get_closest_marker("skip")}
            print(f"\n{len(run):,} tests run and take {self._known.seconds_of_all(run):.0f} CPU seconds")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collected = ids

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._start = so_far()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[object]:
        start = so_far() - _sum(self._shared)  # without the time of fixtures that this one asks for
        result = yield
        if fixturedef.scope == "module":
            self._shared[f"{file_of(request.node.nodeid)}: {fixturedef.argname}"] = (
                so_far() - _sum(self._shared) - start
            )
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        now, shared, self._shared = so_far(), self._shared, {}
        spent, self._start = now - self._start - _sum(shared), now
        # Numbers alone: pytest-xdist sends them to the process that reports.
        report.cpu_s = {name: (took.own_s, took.children_s) for name, took in ({item.nodeid: spent} | shared).items()}
        does_more = self._config.getoption("--full") and _does_more_with_full(item)
        report.is_measured = not (does_more and item.nodeid in self._known.rows)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        self._finished.add(test)
        if (
            report.when == "call"
            and getattr(report, "is_measured", False)
            and (report.passed or hasattr(report, "wasxfail"))
        ):
            self._measured.add(test)
        for name, spent in getattr(report, "cpu_s", {}).items():  # a process that died says nothing
            before = self._seen.get(name, ZERO)
            # A second process sets a shared fixture up again.
            self._seen[name] = before + CpuTime(*spent) if name == test else max(before, CpuTime(*spent), key=_total_s)
            if name != test:
                self._measured.add(name)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if hasattr(self._config, "workerinput"):
            return  # a process of pytest-xdist has seen some of the tests
        total = _sum(self._seen)
        terminalreporter.write_line(
            f"tests took {total.total_s:.0f} CPU seconds, {total.children_s:.0f} of it in children"
        )
        for name in sorted(self._measured, key=lambda name: -self._seen[name].total_s):
            if (took_s := self._seen[name].total_s) > 2 * max(LONG_S, self._known.seconds(name)):
                terminalreporter.write_line(f"{took_s:.0f} CPU seconds, more than {durations.FILE.name} says: {name}")
        if self._config.getoption("--write-durations"):
            durations.write(self._run(), self._config.getoption("--shard"))

    def _run(self) -> Run:
        option = self._config.option
        filters = ("keyword", "markexpr", "deselect", "lf", "stepwise")
        is_filtered = any(getattr(option, name, None) for name in filters) or _are_named(self._config)
        return Run(
            spent={name: spent for name, spent in self._seen.items() if name in self._measured},
            finished=frozenset(self._finished),
            collected=frozenset(() if is_filtered else self._collected),
            is_full=option.full,
            day=time.strftime("%Y-%m-%d"),
        )


def _shard(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def _are_named(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def _does_more_with_full(item: pytest.Item) -> bool:
    return MORE_WITH_FULL in _fixtures(item) or getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _sum(times: dict[str, CpuTime]) -> CpuTime:
    return sum(times.values(), ZERO)


def _total_s(spent: CpuTime) -> float:
    return spent.total_s
