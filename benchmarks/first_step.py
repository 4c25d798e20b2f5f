"""CPU time that a budget adds until training runs, against plain torch.compile.

    python -m benchmarks.first_step [--model gpt] [--setting 0.5] [--json OUT] [--show] [--toy]

Each row is a process with empty folders for what torch compiles, and a second one that finds them filled. It builds a model and
takes three steps (forward and backward); then the CPU seconds of the process and its compilers are read, those of importing torch
among them. "lowered" counts the graphs that Inductor made code for, "compilers" the files that were handed to the C++ compiler,
headers included. The ratio is to the row of plain torch.compile, which is made just before those of the same model; a machine that
is busy with other things distorts CPU time much less than wall time.

Rows are stored in OUT one by one, and those that are there already are not made again; `--show` makes none. The models of
transformers are built from configurations (4 layers, width 256), where that package is installed.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common import harness
from benchmarks.common.first_step_run import MODELS, PLAIN, Taken, missing_package, run

SETTINGS = ("0.5", "min")
TITLES = ("model", "setting", "CPU s", "ratio", "lowered", "compilers", "wall s", "warm CPU s", "warm ratio")


@dataclass(frozen=True)
class FirstStepRow:
    """One model under one setting.

    Attributes:
        setting: Value of `memory_budget`, or "plain".
        cold: Costs with empty folders.
        warm: Costs of a second process, which finds the folders filled.
        skipped: The reason why nothing was measured.
    """

    model: str
    setting: str
    cold: Taken | None = None
    warm: Taken | None = None
    skipped: str = ""

    @staticmethod
    def of(fields: dict[str, object]) -> "FirstStepRow":
        """Inverse of `asdict`: makes a row of its stored fields."""
        taken = {name: Taken(**known) for name in ("cold", "warm") if isinstance(known := fields.get(name), dict)}
        return FirstStepRow(**{**fields, **taken})  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    head, rows = harness.stored_rows(arguments.json, harness.header("cpu"), FirstStepRow.of)
    if not arguments.show:
        for model in arguments.model or MODELS:
            for setting in (PLAIN, *(arguments.setting or SETTINGS)):
                if all((row.model, row.setting) != (model, setting) for row in rows):
                    rows.append(row_of(model, setting, is_toy=arguments.toy))
                    harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser_of_stored_rows(__doc__, MODELS)
    parser.add_argument("--setting", action="append", help="a budget; may be repeated; default 0.5 and min")
    parser.add_argument("--toy", action="store_true", help="tiny models: checks the command, not the claims")
    return parser.parse_args(argv)


def row_of(model: str, setting: str, *, is_toy: bool) -> FirstStepRow:
    """Both processes of one row."""
    skipped = missing_package(model)
    if skipped:
        return FirstStepRow(model, setting, skipped=skipped)
    harness.progress(f"{model} {setting}")
    cold, warm = run(model, setting, is_toy=is_toy)
    return FirstStepRow(model, setting, cold, warm)


def table(rows: Sequence[FirstStepRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each row."""
    return TITLES, [_cells(row, rows) for row in rows]


def _cells(row: FirstStepRow, rows: Sequence[FirstStepRow]) -> list[str]:
    if row.cold is None or row.warm is None:
        return [row.model, row.setting, *["-"] * 6, row.skipped]
    cold, warm = ratios(row, rows)
    lowered = "-" if row.cold.lowered is None else str(row.cold.lowered)
    cells = [f"{row.cold.cpu_s:.1f}", ratio_text(cold), lowered, str(row.cold.num_files), f"{row.cold.wall_s:.1f}"]
    return [row.model, row.setting, *cells, f"{row.warm.cpu_s:.1f}", ratio_text(warm)]


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def ratios(row: FirstStepRow, rows: Sequence[FirstStepRow]) -> tuple[float | None, float | None]:
    """CPU seconds over those of plain torch.compile, cold and warm."""
    plain = next((known for known in rows if (known.model, known.setting) == (row.model, PLAIN)), None)
    if plain is None or row.setting == PLAIN or None in (row.cold, row.warm, plain.cold, plain.warm):
        return None, None
    assert row.cold and row.warm and plain.cold and plain.warm
    return row.cold.cpu_s / plain.cold.cpu_s, row.warm.cpu_s / plain.warm.cpu_s


def summary(rows: Sequence[FirstStepRow]) -> str:
    """Median and worst ratio of each setting."""
    lines = []
    for setting in dict.fromkeys(row.setting for row in rows if row.setting != PLAIN):
        found = [ratios(row, rows) for row in rows if row.setting == setting]
        for name, values in (("empty", [c for c, _ in found if c]), ("filled", [w for _, w in found if w])):
            if values:
                lines.append(
                    f"{setting}, {name} caches: median {statistics.median(values):.2f}, worst {max(values):.2f}"
                )
    return "\n".join(lines) or "no row of ours"


if __name__ == "__main__":
    sys.exit(main())
