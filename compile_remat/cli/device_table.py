"""`compile-remat plan MODEL --devices a,b,c`: for each of several devices, if the model fits, its speed and largest batch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from compile_remat._util.progress import Display
from compile_remat._util.units import format_bytes, format_time
from compile_remat.errors import ConfigError

if TYPE_CHECKING:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.device_choice import DeviceRow
    from compile_remat.forecast.target_step import Target
    from compile_remat.passes import Plan

_COLUMNS = (
    ("device", 9),
    ("batch", 8),
    ("needs", 8),
    ("room", 8),
    ("fits", 4),
    ("step", 7),
    ("extra", 6),
    ("samples/s", 9),
)
_TOKENS = ("tokens/s", 8)
"""Names of columns, and the width of each: rows are printed before the others are known, and all fit 80 columns."""

_FOR_ONE = {
    "compare": "its table has a row for each baseline",
    "html": "a page shows one plan",
    "chrome_trace": "a file holds one predicted step",
    "memory_snapshot": "a file holds one predicted step",
    "slices": "the largest batch of each device is sought with whole rows",
}
"""Options that several devices do not have, with the reason."""


def devices_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of `--devices`; imports no torch.

    Raises:
        ConfigError: A device is named twice, or an option does not apply to several devices.
    """
    from compile_remat.cost_models import device_names

    for name, reason in _FOR_ONE.items():
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for one --device: {reason}.")
    named = [name.strip() for name in arguments.devices.split(",") if name.strip()]
    names = [name for name in device_names() if name != "cpu"] if named == ["all"] else named
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--devices {arguments.devices}: name each device once, with commas between, or `all`.")
    return names


def run_device_table(arguments: argparse.Namespace, builder: Builder, target: Target, display: Display) -> int:
    """Print the rows of each device as soon as they are known; returns status 1 if the batch fits none of them."""
    from compile_remat.forecast.device_choice import compare_devices

    columns = [*_COLUMNS, *([_TOKENS] if "seq" in builder.sizes() else [])]
    names = devices_of(arguments)
    columns[0] = "device", max(map(len, ("device", *names)))

    def show(row: DeviceRow) -> None:
        with display.hidden():
            print("\n".join(_line(columns, cells) for cells in _rows_of(row, builder.sizes().get("batch"))), flush=True)

    if not arguments.json:
        sizes = ", ".join(f"{name} {size}" for name, size in builder.sizes().items())
        with display.hidden():
            budget = "" if target.budget.kind == "auto" else f", budget {target.budget}"
            print(f"{builder.name} ({sizes}; {builder.dtype_name}), optimizer {target.optimizer}{budget}")
            print(
                _line(columns, [name for name, _ in columns]),
                _line(columns, ["-" * width for _, width in columns]),
                sep="\n",
                flush=True,
            )
    targets = [replace(target, device=name) for name in names]
    known = (lambda row: None) if arguments.json else show
    rows = compare_devices(builder, targets, display, known, with_max_batch=not arguments.no_largest_batch)
    with display.hidden():
        if arguments.json:
            print(json.dumps([row.to_json_data() for row in rows], indent=1))
        else:
            _print_notes(rows)
    return 1 if all(row.fits is False for row in rows) else 0


def extra_time_text(plan: Plan) -> str:
    """Returns the line below a table that says what its extra times are."""
    return f"extra time: beyond the step of {plan.base.name}; below 0: the plan is faster"


def _print_notes(rows: Sequence[DeviceRow]) -> None:
    from compile_remat.forecast.device_choice import BY_RULES
    from compile_remat.forecast.lowering.observing import facts_text

    if any(row.largest is not None for row in rows):
        print("the second line of a device is its largest batch that fits")
    print(f"needs: bytes at the step's peak; {facts_text(BY_RULES)}")
    print("step: the cost model's estimate of forward and backward, without the optimizer's step")
    print(extra_time_text(rows[0].plan))
    if noted := [row for row in rows if row.time_note]:
        print(f"step of {', '.join(row.device for row in noted)}: {noted[0].time_note}")
    for row in rows:
        if row.largest is not None and row.largest.why:
            print(f"{row.device}: {'largest batch not known: ' * (row.largest.batch is None)}{row.largest.why}")


def _rows_of(row: DeviceRow, batch: int | None) -> list[list[str]]:
    """Returns the cells of the batch that was asked for, and those of the largest batch if it is known."""
    room = "-" if row.limit_bytes is None else format_bytes(row.limit_bytes)
    fits = {None: "-", True: "yes", False: "no"}[row.fits]
    asked = [row.device, *_step_cells(batch, row.total_bytes, row.plan, row.seq)]
    found = [[*asked[:3], room, fits, *asked[3:]]]
    largest = row.largest
    if largest is not None and largest.plan is not None and largest.batch and largest.total_bytes is not None:
        cells = _step_cells(largest.batch, largest.total_bytes, largest.plan, row.seq)
        found.append(["", *cells[:2], "", "", *cells[2:]])
    return found


def _step_cells(batch: int | None, total_bytes: int, plan: Plan, seq: int | None) -> list[str]:
    samples_per_s = None if batch is None else batch * 1e9 / max(1, plan.time_ns)
    return [
        "-" if batch is None else str(batch),
        format_bytes(total_bytes),
        format_time(plan.time_ns),
        f"{plan.extra_share:+.1%}",
        "-" if samples_per_s is None else f"{samples_per_s:,.{1 if samples_per_s < 1000 else 0}f}",
        *([] if seq is None else ["-" if samples_per_s is None else f"{samples_per_s * seq:,.0f}"]),
    ]


def _line(columns: Sequence[tuple[str, int]], cells: Sequence[str]) -> str:
    """Returns a line of the table: the first column is left-aligned."""
    padded = [cells[0].ljust(columns[0][1])]
    padded += [cell.rjust(width) for cell, (_, width) in zip(cells[1:], columns[1:], strict=True)]
    return "  " + ("  " if len(columns) == len(_COLUMNS) else " ").join(padded).rstrip()
