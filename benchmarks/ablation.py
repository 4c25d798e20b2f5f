"""What each heuristic of the search and each special rule of the memory model is worth: each is switched off in turn.

    python -m benchmarks.ablation [--part search] [--part rules] [--problem gpt] [--merge] [--json OUT]

`search` plans the stored problems of `benchmarks.digest` at 0.8, 0.6, 0.4 and 0.3 of the fastest plan's peak and for the lowest
peak: once with the defaults of `SearchOptions`, and once with each heuristic switched off, in one process and by CPU time.  A
switch that the planner does not reach at a budget changes nothing there, and is not planned for.  `rules` has Inductor emit the
code of the models that a rule concerns (nothing is compiled) and compares the peak of this code, by a dry run, with the predicted
peak of the same plan, with all rules and with each one taken out of the problem.  `--merge` adds to the file of `--json`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.harness import ascii_table, header, print_header
from benchmarks.digest import CODE_MODELS, FRACTIONS, emitted, stored_problems
from compile_remat.api import look
from compile_remat.passes import Plan, Planner, Problem, SearchOptions, timeline
from compile_remat.report import reports, reset_reports

SWITCHES: dict[str, dict[str, Any]] = {
    "window exchange": {"uses_window_exchange": False},
    "continuation": {"uses_continuation": False},
    "perturbation": {"uses_perturbation": False},
    "lower target": {"uses_lower_target": False},
    "minimum-peak targets": {"min_peak_targets": ()},
    "search for the floor": {"uses_floor_search": False},
    "recursion": {"uses_recursion": False},
    "starts of the bound": {"uses_moments": False},
}
"""The options without each heuristic."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

SETTINGS = (*map(str, FRACTIONS), "min")


@dataclass(frozen=True)
class SearchRow:
    """One plan; figures of time are parts of the step's estimated time.

    Attributes:
        off: The heuristic that was switched off; empty for none.
        is_reached: Whether the planner asked for that heuristic at this budget; where not, the plan is the default one.
        planning_s: CPU seconds of the planning.
    """

    problem: str
    setting: str
    off: str
    is_reached: bool
    is_feasible: bool
    peak_bytes: int
    extra: float
    bound: float
    planning_s: float


@dataclass(frozen=True)
class RuleRow:
    """The predicted peak of one plan beside that of its code, with one rule taken out of the problem."""

    model: str
    setting: str
    off: str
    predicted_bytes: int
    codegen_bytes: int


# -- the search ---------------------------------------------------------------------------------------------------------


class _Ladder(tuple[float, ...]):
    """Targets that note whether more of them are asked for than the ablated ladder has."""

    is_reached: Callable[[], None]
    kept: int

    def __iter__(self) -> Iterator[float]:
        for k, target in enumerate(super().__iter__()):
            if k >= self.kept:
                self.is_reached()
            yield target


def watched(asked: set[str]) -> SearchOptions:
    """The default options, which note in `asked` which of the switched options a planner reads."""
    ablated = {name: value for changes in SWITCHES.values() for name, value in changes.items()}

    class Watched(SearchOptions):
        def __getattribute__(self, name: str) -> Any:
            if isinstance(ablated.get(name), bool):
                asked.add(name)
            return super().__getattribute__(name)

    ladders: dict[str, Any] = {}
    for field in fields(SearchOptions):
        if isinstance(ablated.get(field.name), tuple):
            ladder = _Ladder(getattr(SearchOptions(), field.name))
            ladder.kept = len(ablated[field.name])
            ladder.is_reached = lambda name=field.name: asked.add(name)  # type: ignore[misc]
            ladders[field.name] = ladder
    return Watched(**ladders)


def search_rows(name: str, problem: Problem) -> list[SearchRow]:
    """The plans of one problem: for each budget with the defaults, then without each heuristic that they reached."""
    peak_bytes, rows = Planner(problem).fastest().peak_bytes, []
    for setting in SETTINGS:
        asked: set[str] = set()
        base = _planned(name, problem, setting, peak_bytes, "", watched(asked))
        rows.append(base)
        for off, changes in SWITCHES.items():
            if asked.isdisjoint(changes):
                rows.append(replace(base, off=off, is_reached=False))
            else:
                rows.append(_planned(name, problem, setting, peak_bytes, off, replace(SearchOptions(), **changes)))
    return rows


def _planned(
    name: str, problem: Problem, setting: str, fastest_bytes: int, off: str, options: SearchOptions
) -> SearchRow:
    begin = time.process_time()
    planner = Planner(problem, options=options)
    plan = planner.lowest() if setting == "min" else planner.within(int(float(setting) * fastest_bytes))
    step_ns = max(1, problem.step_time_ns)
    return SearchRow(
        problem=name,
        setting=setting,
        off=off,
        is_reached=True,
        is_feasible=plan.is_feasible,
        peak_bytes=plan.peak_bytes,
        extra=plan.extra_time_ns / step_ns,
        bound=plan.bound_time_ns / step_ns,
        planning_s=time.process_time() - begin,
    )


def search_table(rows: Sequence[SearchRow]) -> Table:
    """One line for each heuristic: changes without it, of extra time and gap in % of the step, of the floor in %."""
    base = {(row.problem, row.setting): row for row in rows if not row.off}
    if not base:
        return (), ()
    kept = list(base.values())
    gap = 100 * statistics.mean(row.extra - row.bound for row in kept if _is_in_budget(row))
    lines = [["(all on)", "", "", "", "", "", "", f"{gap:.2f}", "1.00", ""]]
    for off in dict.fromkeys(row.off for row in rows if row.off):
        pairs = [(base[row.problem, row.setting], row) for row in rows if row.off == off]
        lines.append([off, *_changes(pairs), str(sum(row.is_reached for _, row in pairs))])
    titles = ("off", "extra worst", "at", "mean", "floor worst", "at", "mean", "gap", "CPU time", "reached")
    return titles, lines


def _is_in_budget(row: SearchRow) -> bool:
    return row.is_feasible and row.setting != "min"


def _changes(pairs: Sequence[tuple[SearchRow, SearchRow]]) -> list[str]:
    extra = [(100 * (b.extra - a.extra), b) for a, b in pairs if _is_in_budget(a) and _is_in_budget(b)]
    floor = [
        (100 * (b.peak_bytes / a.peak_bytes - 1), b) for a, b in pairs if not (_is_in_budget(a) and _is_in_budget(b))
    ]
    gap = 100 * statistics.mean(b.extra - b.bound for _, b in pairs if _is_in_budget(b))
    seconds = sum(b.planning_s for _, b in pairs) / sum(a.planning_s for a, _ in pairs)
    return [*_worst_and_mean(extra), *_worst_and_mean(floor), f"{gap:.2f}", f"{seconds:.2f}"]


def _worst_and_mean(changes: Sequence[tuple[float, SearchRow]]) -> list[str]:
    worst, row = max(changes, key=lambda change: change[0])
    mean = statistics.mean(change for change, _ in changes)
    return [f"{worst:+.2f}", f"{row.problem} {row.setting}" if worst else "", f"{mean:+.3f}"]


# -- rules of the memory model ------------------------------------------------------------------------------------------


def _without_copies(problem: Problem) -> Problem:
    return replace(problem, values=tuple(replace(v, copies=(), ordered_by=()) for v in problem.values))


def _without_parts(problem: Problem) -> Problem:
    return replace(problem, values=tuple(replace(v, parts=()) for v in problem.values))


def _without_channels_last(problem: Problem) -> Problem:
    values = tuple(replace(v, is_channels_last=False) for v in problem.values)
    return replace(problem, values=values, steps=tuple(replace(s, is_channels_last=False) for s in problem.steps))


RULES: dict[str, Callable[[Problem], Problem]] = {
    "": lambda problem: problem,
    "copies of concatenations": _without_copies,
    "parts of concatenations": _without_parts,
    "all of concatenations": lambda problem: _without_parts(_without_copies(problem)),
    "channels-last": _without_channels_last,
}
"""Problems without each rule; the first one has them all."""

RULE_MODELS = {**CODE_MODELS, "vit": 0.3, "recurrent": 0.3, "convnext": 0.3, "autoencoder": 1.0}
RULE_SETTINGS = (0.5, "min")


def rule_rows(name: str) -> list[RuleRow]:
    """Predicted and codegen peak of one model's plans, with each rule taken out."""
    rows = []
    for setting in RULE_SETTINGS:
        case = models.build(name, scale=RULE_MODELS[name])
        (planned,) = look(
            case.module, case.inputs, for_budgets=True, memory_budget="max", device="cpu", capacity="100GiB"
        )
        reset_reports()
        list(emitted(case.module, case.inputs, setting))
        report = next(iter(reports()), None)
        if report is None or report.plan is None or report.scheduled_peak_bytes is None:
            harness.progress(f"{name} {setting}: no codegen peak is known")
            continue
        for off, rule in RULES.items():
            predicted = _predicted_bytes(rule(planned.problem), report.plan)
            rows.append(RuleRow(name, str(setting), off, predicted, report.scheduled_peak_bytes))
    return rows


def _predicted_bytes(problem: Problem, plan: Plan) -> int:
    return timeline(problem, plan).peak_bytes


def rule_table(rows: Sequence[RuleRow]) -> Table:
    """One line for each plan: the error of its predicted peak with all rules and without each, in % of the codegen peak."""
    lines = []
    for model, setting in dict.fromkeys((row.model, row.setting) for row in rows):
        of = {row.off: row for row in rows if (row.model, row.setting) == (model, setting)}
        errors = [f"{100 * (row.predicted_bytes / row.codegen_bytes - 1):+.2f}" for row in of.values()]
        lines.append([f"{model} {setting}", harness.mib(of[""].codegen_bytes), *errors, ""])
    titles = ("plan", "codegen MiB", "all rules", *(f"no {off}" for off in RULES if off), "")
    return titles, lines


# -- the command --------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, print the tables, write the file."""
    arguments = _parse(argv)
    torch.set_num_threads(2)  # workspaces of kernels depend on it
    head = header("cpu")
    print_header(head)
    search, rules = rows_of(_known(arguments.json) if arguments.merge else [])
    parts = arguments.part or ("search", "rules")
    for name, problem in stored_problems().items() if "search" in parts else ():
        if name in (arguments.problem or (name,)):
            search = [row for row in search if row.problem != name] + search_rows(name, problem)
            harness.progress(f"{name}: {sum(row.planning_s for row in search if row.problem == name):.1f} s")
            _write(arguments.json, head, search, rules)
    for name in RULE_MODELS if "rules" in parts else ():
        if name in (arguments.problem or (name,)):
            rules = [row for row in rules if row.model != name] + rule_rows(name)
            harness.progress(f"{name}: emitted")
            _write(arguments.json, head, search, rules)
    for title, table in (("search", search_table(search)), ("rules", rule_table(rules))):
        print(f"\n{title}\n{ascii_table(*table)}" if table[1] else "")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("search", "rules"), help="may be repeated; default both")
    parser.add_argument("--problem", action="append", help="stored problem, or model of the rules; may be repeated")
    parser.add_argument("--merge", action="store_true", help="keep the rows of the file that are not measured anew")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything to this file")
    return parser.parse_args(argv)


def rows_of(stored: Sequence[dict[str, Any]]) -> tuple[list[SearchRow], list[RuleRow]]:
    """The rows of a file, of both kinds."""
    search = [SearchRow(**row) for row in stored if "problem" in row]
    return search, [RuleRow(**row) for row in stored if "model" in row]


def _known(path: Path | None) -> list[dict[str, Any]]:
    known: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    return known


def _write(path: Path | None, head: dict[str, str], search: Sequence[SearchRow], rules: Sequence[RuleRow]) -> None:
    harness.write_json(path, head, [*search, *rules])


if __name__ == "__main__":
    sys.exit(main())
