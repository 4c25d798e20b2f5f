"""Rows of the zoo as lines, as a summary with every row that misses, and of two files beside each other."""

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import harness
from benchmarks.common.harness import mib
from benchmarks.zoo import ENTRIES
from benchmarks.zoo.rows import ADVICE, FAILED, OK, PLAIN, SETTINGS, STALLED, TIMEOUT, ZooRow, plain_of

LIMIT = 0.005
"""Largest tolerated error of a prediction, as a part of the emitted peak."""
GRADIENT_LIMIT = 2e-3
"""Largest tolerated error of a gradient in float32, over the largest value of any gradient."""
TITLES = (
    "model",
    "setting",
    "graphs",
    "budget",
    "predicted",
    "emitted",
    "error",
    "of plain",
    "rounds",
    "CPU s",
    "remark",
)


def rows_of(path: Path) -> tuple[dict[str, str], list[ZooRow]]:
    """Header and rows of a stored file."""
    stored = json.loads(path.read_text())
    return stored["header"], [ZooRow.of(fields) for fields in stored["rows"]]


def show(path: Path) -> int:
    """Print the summary of a file and the rows that miss; the exit status is 1 where there are some."""
    head, rows = rows_of(path)
    harness.print_header(head)
    print(text_of(rows))
    missed = [row for row in rows if miss(row, rows)]
    if missed:
        print("\n" + harness.ascii_table(*table(missed, rows)))
    return int(bool(missed))


def table(rows: Sequence[ZooRow], everything: Sequence[ZooRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each row; `everything` has the rows of plain torch.compile."""
    return TITLES, [cells(row, plain_of(row, everything), miss(row, everything)) for row in rows]


def cells(row: ZooRow, plain: ZooRow | None, remark: str) -> list[str]:
    """One line of the table; of several graphs, the one with the largest figure."""
    of_plain = share(row, plain)
    return [
        row.model,
        row.setting,
        "-" if row.graphs is None else str(row.graphs),
        mib(row.budget_bytes),
        mib(_highest(row.predicted_bytes)),
        mib(row.peak_bytes),
        "-" if row.error is None else f"{row.error:+.2%}",
        "-" if of_plain is None else f"{of_plain:.2f}",
        "-" if not row.rounds else str(max(row.rounds)),
        "-" if row.cpu_s is None else f"{row.cpu_s:.0f}",
        remark,
    ]


def model_table(rows: Sequence[ZooRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each model and dtype: predicted > emitted peak under each setting."""
    settings = ("max", "0.6", "0.4", "min")
    lines = []
    for name, dtype in dict.fromkeys((row.model, row.dtype) for row in rows):
        mine = {row.setting: row for row in rows if (row.model, row.dtype) == (name, dtype)}
        errors = [row.error for row in mine.values() if row.error is not None]
        plain, any_row = mine.get(PLAIN), next(iter(mine.values()))
        figures = [_peaks_text(mine.get(setting)) for setting in settings]
        worst = f"{max(errors, key=abs):+.2%}" if errors else "-"
        written = name if dtype == "float32" else f"{name}, {dtype}"
        lines.append([written, any_row.library, mib(plain.peak_bytes if plain else None), *figures, worst])
    return ("model", "library", "plain", *settings, "worst"), lines


def _peaks_text(row: ZooRow | None) -> str:
    if row is None:
        return "-"
    if row.outcome != OK:
        return row.outcome
    return f"{mib(_highest(row.predicted_bytes))} > {mib(row.peak_bytes)}"


def _highest(peaks: Sequence[int | None]) -> int | None:
    return max((each for each in peaks if each), default=None)


def share(row: ZooRow, plain: ZooRow | None) -> float | None:
    """The emitted peak over that of plain torch.compile, of the highest graphs."""
    if plain is None or not plain.peak_bytes or row.peak_bytes is None:
        return None
    return row.peak_bytes / plain.peak_bytes


def line(row: ZooRow, plain: ZooRow | None) -> str:
    """A row as it is made."""
    return "  ".join(cells(row, plain, remark_of(row)))


def remark_of(row: ZooRow) -> str:
    """Texts of one row: a failure, a floor, measured figures, the first warning."""
    parts = [row.failure] if row.failure else []
    if row.floor_bytes is not None:
        parts.append(f"floor {mib(row.floor_bytes)}")
    if row.measured_bytes is not None:
        parts.append(f"measured {mib(row.measured_bytes)}")
    if row.gradient_error is not None:
        parts.append(f"gradients {row.gradient_error:.1e} from {row.reference}")
    parts += [f"warned: {text}" for text in row.warnings[:1]]
    return "; ".join(parts)


def miss(row: ZooRow, rows: Sequence[ZooRow]) -> str:
    """The reason why a row falls short; empty if it does not.

    A floor is one graph's.  It is right unless `min` of the same model lies below the budget, or every graph's peak under `min`
    beside the floor by more than `LIMIT`.
    """
    if row.outcome in (FAILED, TIMEOUT, STALLED):
        return f"{row.outcome}: {row.failure}"
    if row.setting == PLAIN:
        return ""
    if row.setting == ADVICE and row.floor_bytes is not None:
        return f"refused at {mib(row.budget_bytes)}, which an error asked for"
    reasons = _floor_reasons(row, rows) if row.floor_bytes is not None else _plan_reasons(row)
    reasons += _kept_below_min(row, rows)
    is_one = row.graphs == 1 and row.measured_bytes is not None and row.peak_bytes is not None
    if is_one and abs((row.peak_bytes or 0) / (row.measured_bytes or 1) - 1) > LIMIT:
        reasons.append(f"measured {mib(row.measured_bytes)}")
    if row.gradient_error is not None and row.dtype == "float32" and row.gradient_error > GRADIENT_LIMIT:
        reasons.append(f"gradients {row.gradient_error:.1e} from {row.reference}")
    return "; ".join([*reasons, *(f"warned: {text}" for text in row.warnings[:1] if reasons)])


def _kept_below_min(row: ZooRow, rows: Sequence[ZooRow]) -> list[str]:
    """A budget that is kept more than `LIMIT` below the peak of `min` of the same model."""
    lowest = next((known for known in rows if known.run == (row.model, "min", row.dtype, row.is_real)), None)
    if lowest is None or not lowest.peak_bytes or row.budget_bytes is None or row.peak_bytes is None:
        return []
    is_below = row.outcome == OK and row.peak_bytes < (1 - LIMIT) * lowest.peak_bytes
    return [f"min takes {mib(lowest.peak_bytes)}"] if is_below else []


def _plan_reasons(row: ZooRow) -> list[str]:
    reasons = []
    if row.graphs == 0:
        reasons.append("no graph has a backward")
    if any(each is None for each in (*row.predicted_bytes, *row.emitted_bytes)):
        reasons.append(f"a peak is not known: {row.failure}" if row.failure else "a peak is not known")
    if row.is_over:
        reasons.append("over the budget")
    if row.error is not None and abs(row.error) > LIMIT:
        reasons.append("prediction" if len(row.errors) == 1 else f"prediction: {_worst_graph_text(row)}")
    return reasons


def _worst_graph_text(row: ZooRow) -> str:
    pairs = [(p, e) for p, e in zip(row.predicted_bytes, row.emitted_bytes, strict=False) if p and e]
    predicted, emitted = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return f"{mib(predicted)} > {mib(emitted)} in one graph"


def _floor_reasons(row: ZooRow, rows: Sequence[ZooRow]) -> list[str]:
    lowest = next((known for known in rows if known.run == (row.model, "min", row.dtype, row.is_real)), None)
    if lowest is None or not lowest.peak_bytes or row.floor_bytes is None or row.budget_bytes is None:
        return []
    reasons = []
    if row.budget_bytes >= lowest.peak_bytes:
        reasons.append(f"refused, although min reaches {mib(lowest.peak_bytes)}")
    if min(abs(row.floor_bytes / peak - 1) for peak in lowest.emitted_bytes if peak) > LIMIT:
        reasons.append(f"floor {mib(row.floor_bytes)}, min reaches {mib(lowest.peak_bytes)}")
    return reasons


# -- sums ---------------------------------------------------------------------------------------------------------------


def text_of(rows: Sequence[ZooRow]) -> str:
    """Numbers of rows, errors, rounds, floors."""
    ours = [row for row in rows if row.setting != PLAIN]
    plain = [row for row in rows if row.setting == PLAIN]
    models = dict.fromkeys(row.model for row in rows)
    outcomes = Counter(row.outcome for row in ours)
    lines = [
        f"{len(models)} models, {len(ours)} rows: {', '.join(f'{n} {name}' for name, n in sorted(outcomes.items()))}",
        f"plain torch.compile: {len(plain)} rows, {sum(row.outcome != OK for row in plain)} without code",
        *(
            text
            for setting in (*SETTINGS, ADVICE)
            if (text := _errors_text(setting, [r for r in ours if r.setting == setting]))
        ),
        _errors_text("all", ours),
        f"over the budget: {sum(row.is_over for row in ours)} of {sum(row.budget_bytes is not None for row in ours)} rows",
        "rounds: " + _counts(Counter(count for row in ours for count in row.rounds)),
        "graphs: " + _counts(Counter(row.graphs for row in ours if row.graphs is not None)),
    ]
    found = [value for row in ours if row.setting == "min" and (value := share(row, plain_of(row, rows))) is not None]
    if found:
        lines.append(f"min over plain: median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")
    measured = [row for row in ours if row.gradient_error is not None]
    if measured:
        lines.append(
            f"gradients: worst {max(row.gradient_error or 0.0 for row in measured):.1e} of {len(measured)} rows"
        )
    planning = [(row.planning_cpu_s or 0.0, row) for row in ours if row.cpu_s]
    if planning:
        slowest, row = max(planning, key=lambda each: each[0])
        share_of_all = statistics.median(seconds / (each.cpu_s or 1.0) for seconds, each in planning)
        lines.append(
            f"planning: median {share_of_all:.0%} of the CPU seconds, longest {slowest:.0f} s ({row.model} at {row.setting})"
        )
    lines.append(_left_text(rows))
    lines.append(f"rows that miss: {sum(bool(miss(row, rows)) for row in rows)}")
    return "\n".join(text for text in lines if text)


def _left_text(rows: Sequence[ZooRow]) -> str:
    """Text with the number of rows not made yet; no row is made of a model that plain torch.compile fails on."""
    made = {(row.model, row.setting) for row in rows}
    broken = {row.model for row in rows if row.setting == PLAIN and row.outcome != OK}
    names = [entry.name for entry in ENTRIES if entry.name not in broken]
    left = {setting: sum((name, setting) not in made for name in names) for setting in SETTINGS}
    counts = ", ".join(f"{number} at {setting}" for setting, number in left.items() if number)
    return f"rows not made yet: {counts}" if counts else ""


def _errors_text(name: str, rows: Sequence[ZooRow]) -> str:
    errors = [row.error for row in rows if row.error is not None]
    if not errors:
        return ""
    sizes = sorted(map(abs, errors))
    at_95 = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    above = sum(size > LIMIT for size in sizes)
    return (
        f"predicted over emitted, {name}: median {statistics.median(sizes):.2%}, 95th {at_95:.2%}, "
        f"worst {max(errors, key=abs):+.1%}, {above} of {len(errors)} rows above {LIMIT:.1%}"
    )


def _counts(counter: Counter[int]) -> str:
    return ", ".join(f"{number} in {counter[number]}" for number in sorted(counter)) or "none"


# -- two files ----------------------------------------------------------------------------------------------------------


def compare(before: Path, after: Path) -> int:
    """Print what changed between two files, over the rows that both have; the exit status is 1 where a row misses anew."""
    (_, old), (_, new) = rows_of(before), rows_of(after)
    known = {row.run: row for row in old}
    pairs = [(known[row.run], row) for row in new if row.run in known and row.setting != PLAIN]
    for name, figure in COMPARED.items():
        print(_ratios_text(name, [(a, b) for a, b in pairs if figure(a) and figure(b)], figure))
    print(f"rounds: {_counts(Counter(n for a, _ in pairs for n in a.rounds))}")
    print(f"then:   {_counts(Counter(n for _, b in pairs for n in b.rounds))}")
    print(
        f"rows that miss: {sum(bool(miss(a, old)) for a, _ in pairs)}, then {sum(bool(miss(b, new)) for _, b in pairs)}"
    )
    anew = [b for a, b in pairs if miss(b, new) and not miss(a, old)]
    if anew:
        print("\nrows that miss now and did not before:\n\n" + harness.ascii_table(*table(anew, new)))
    return int(bool(anew))


def _lowest_bytes(row: ZooRow) -> float | None:
    """The floor: emitted under `min`, or as an error named it."""
    return row.peak_bytes if row.setting == "min" else row.floor_bytes


def _extended_ns(row: ZooRow) -> float | None:
    """The predicted time of a step, with what is computed again, under a budget in bytes."""
    if row.budget_bytes is None or row.step_ns is None or row.extra_ns is None:
        return None
    return row.step_ns + row.extra_ns


COMPARED: dict[str, Callable[[ZooRow], float | None]] = {
    "floors": _lowest_bytes,
    "peaks": lambda row: row.peak_bytes if row.outcome == OK else None,
    "predicted step times": _extended_ns,
    "CPU seconds": lambda row: row.cpu_s,
    "CPU seconds of planning": lambda row: row.planning_cpu_s,
}


def _ratios_text(name: str, pairs: Sequence[tuple[ZooRow, ZooRow]], figure: Callable[[ZooRow], float | None]) -> str:
    ratios = [((figure(b) or 0.0) / (figure(a) or 1.0), b) for a, b in pairs]
    if not ratios:
        return f"{name}: no row in both"
    values = [ratio for ratio, _ in ratios]
    worst, row = max(ratios, key=lambda each: each[0])
    text = f"median {statistics.median(values):.4f}, worst {worst:.4f} ({row.model} at {row.setting}), least {min(values):.4f}"
    return f"{name}, after over before: {text}, {len(values)} rows"
