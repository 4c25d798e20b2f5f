"""Puts faults into offload one at a time, and counts the programs in which a race is found: ``python -m tests.races.mutations``.

A third of the programs are models under random plans, the others are random programs; each sends tensors to the host.  They are
compiled by Inductor and watched (`emitted`), not run.  `tried` are the waits that were left out, or the places that were changed;
`found` are those by which two accesses lose their order.  All others are proven to be in order without: another wait has the same
effect.  `refused` are those at which the product's check of emitted code finds a fault.  A fault of the code that was found in
`ENOUGH` programs is not tried in more.  The exit status is 1 if a program has a race as it is, or if a fault that should be found
in `ENOUGH` programs is not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.common import harness
from tests.correctness.test_offload import MODELS
from tests.fuzz.campaign import use_one_thread
from tests.races import changes
from tests.races.clocks import has_race, races, waits
from tests.races.steps import STEPS, Case, Compiled, cases, of_models, one_step, stopped_forward

ENOUGH = 20
"""Programs in which a fault has to be found, unless it is harmless."""

HARMLESS = {
    changes.WAITS[f"fetch: {changes.BACK} for {changes.OUT}"]: "release has waited for it, in the same stream",
    "release before the last reader": "the wait comes sooner; the memory would not be free where the plan has it",
    "copies where Inductor's own order has them": "nothing runs beside the copies",
    changes.FREE: "release is the last reader that Inductor knows",
    "arrive left out": "the copy's ticket ends there, and waits",
    "Inductor may reuse the tensor on the host": "Inductor takes an input only for a kernel of its own that reads it",
}
"""The reasons for faults that need not be found, by row."""


@dataclass
class Row:
    """Counts of one fault.

    Attributes:
        programs: Programs that have the place of the fault.
        tried, found: Places of the fault, and those at which a race was found.
        refused: Places at which the product's own check of emitted code refuses the plan; a left-out wait is no matter of code.
        failing: Programs in which a race was found.
    """

    programs: int = 0
    tried: int = 0
    found: int = 0
    refused: int = 0
    failing: int = 0

    def add(self, results: Iterable[tuple[bool, bool]]) -> None:
        """Count the places of one program, each with whether a race was found, and whether the code is refused."""
        seen = list(results)
        self.programs += bool(seen)
        self.tried += len(seen)
        self.found += sum(found for found, _ in seen)
        self.refused += sum(refused for _, refused in seen)
        self.failing += any(found for found, _ in seen)


@dataclass
class Table:
    """Rows by the text of the fault, and the races of programs without one."""

    rows: dict[str, Row] = field(default_factory=dict)
    races: list[str] = field(default_factory=list)
    programs: int = 0

    @property
    def missing(self) -> list[str]:
        """Rows of faults that were found in too few programs."""
        return [text for text, row in self.rows.items() if row.failing < ENOUGH and text not in HARMLESS]

    def row(self, text: str) -> Row:
        """The row of a fault."""
        return self.rows.setdefault(text, Row())

    def needs(self, text: str) -> bool:
        """True if a fault has been found in too few programs, or a harmless one was tried in too few."""
        row = self.row(text)
        return (row.programs if text in HARMLESS else row.failing) < ENOUGH


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.races.mutations", description=__doc__)
    parser.add_argument("--programs", type=int, default=54)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    use_one_thread()
    table = Table()
    for case, compiled in cases(arguments.programs, arguments.seed):
        look(table, case, compiled)
        harness.progress(f"{table.programs} of {arguments.programs} programs")
    complete(table, arguments.seed, arguments.programs)
    print(harness.ascii_table(TITLES, cells(table)))
    print(f"{table.programs} programs, races without a fault: {len(table.races)}", *table.races[:10], sep="\n")
    return int(bool(table.races or table.missing))


def complete(table: Table, seed: int, most: int) -> None:
    """Try faults that were found in too few programs in more models, at most so many; Inductor reads no host tensor elsewhere."""
    for case, _ in itertools.islice(of_models(seed, ["convolutions"]), most):
        _compile_changed(table, case, changes.READABLE, changes.readable_on_the_host, {})
    for case, _ in itertools.islice(of_models(seed + most, MODELS), most):
        if changes.EDITS.keys().isdisjoint(table.missing):
            break
        _edit_code(table, case.compiled(options=changes.FREE_OPTIONS))


def look(table: Table, case: Case, compiled: Compiled) -> None:
    """Try each fault in one program."""
    table.programs += 1
    _drop_waits(table, compiled)
    with changes.let_go():
        table.row(changes.LET_GO).add([(has_race(compiled.trace(stopped_forward)), False)])
    free = case.compiled(options=changes.FREE_OPTIONS)
    table.row(changes.FREE).add([_seen(free)])
    _edit_code(table, free)
    for text, change in changes.COMPILED.items():
        _compile_changed(table, case, text, change, changes.FREE_OPTIONS)


def _drop_waits(table: Table, compiled: Compiled) -> None:
    """Leave out each wait of each kind of step."""
    found: dict[str, list[bool]] = {}
    for name, step in STEPS.items():
        trace = compiled.trace(step)
        table.races += [f"{name}: {race}" for race in races(trace)]
        for wait in waits(trace):
            found.setdefault(changes.WAITS[wait.kind], []).append(has_race(trace, [wait.number]))
    for text, results in found.items():
        table.row(text).add((race, False) for race in results)


def _seen(compiled: Compiled) -> tuple[bool, bool]:
    """True if a step has a race, and whether the code is refused."""
    return has_race(compiled.trace(one_step)), compiled.is_refused


def _edit_code(table: Table, compiled: Compiled) -> None:
    """Move or leave out each call of an operator."""
    for text, (operator, edit) in changes.EDITS.items():
        if table.needs(text):
            table.row(text).add(_fails_with(compiled, operator, edit))


def _fails_with(compiled: Compiled, operator: str, edit: changes.Edit) -> Iterator[tuple[bool, bool]]:
    """Yields `_seen` for each call of an operator that is edited."""
    for code in compiled.codes:
        source = code.source_code
        for changed in changes.edits(source, operator, edit):
            code.take(changed)
            yield _seen(compiled)
        code.take(source)


def _compile_changed(table: Table, case: Case, text: str, change: changes.Change, options: Mapping[str, bool]) -> None:
    """Compile a program with a fault."""
    if table.needs(text):
        table.row(text).add([_seen(case.compiled(change, options))])


TITLES = ("fault", "programs", "tried", "found", "refused", "programs with a race")


def cells(table: Table) -> list[list[str]]:
    """Rows of the table."""
    return [
        [text, *map(str, (row.programs, row.tried, row.found, row.refused, row.failing))]
        for text, row in table.rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
