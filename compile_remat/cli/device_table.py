"""`compile-remat plan MODEL --devices a,b,c`: for each of several devices, if the model fits, its speed and largest batch."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from compile_remat._util.progress import Advance
from compile_remat._util.text_table import print_table
from compile_remat._util.units import format_bytes, format_time
from compile_remat.errors import ConfigError

if TYPE_CHECKING:
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.device_choice import DeviceRow
    from compile_remat.forecast.target_step import Target

_HEADS = ("device", "room", "needs", "fits", "step", "largest batch", "its step", "extra time", "samples/s", "tokens/s")


def devices_of(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of `--devices`; imports no torch.

    Raises:
        ConfigError: A device is named twice, or an option does not apply to several devices.
    """
    from compile_remat.budget import MemoryBudget
    from compile_remat.cost_models import device_names

    for name in ("compare", "html", "chrome_trace", "memory_snapshot", "no_largest_batch", "slices"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for one --device.")
    if MemoryBudget.parse(arguments.budget).kind != "auto":
        raise ConfigError("--budget is for one --device: with --devices each has what it has left.")
    named = [name.strip() for name in arguments.devices.split(",") if name.strip()]
    names = [name for name in device_names() if name != "cpu"] if named == ["all"] else named
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--devices {arguments.devices}: name each device once, with commas between, or `all`.")
    return names


def run_device_table(arguments: argparse.Namespace, builder: Builder, target: Target, advance: Advance) -> int:
    """Print one row for each device; returns status 1 if the batch fits none of them."""
    from compile_remat.forecast.device_choice import BY_RULES, compare_devices
    from compile_remat.forecast.lowering.observing import facts_text

    targets = [replace(target, device=name) for name in devices_of(arguments)]
    rows = compare_devices(builder, targets, advance)
    if arguments.json:
        print(json.dumps([row.to_json_data() for row in rows], indent=1))
    else:
        sizes = ", ".join(f"{name} {size}" for name, size in builder.sizes().items())
        title = f"{builder.name} ({sizes}; {builder.dtype_name}), optimizer {target.optimizer}"
        print_table(title, _HEADS, [_cells(row) for row in rows])
        print(f"what it needs: {facts_text(BY_RULES)}")
        print("times are the cost model's estimates of forward and backward; the optimizer's step is not in them")
        print(f"extra time: beyond the step of {rows[0].plan.base.name}")
        for row in rows:
            if row.largest is not None and row.largest.why:
                print(f"{row.device}: {'largest batch not known: ' * (row.largest.batch is None)}{row.largest.why}")
    return 1 if all(row.fits is False for row in rows) else 0


def _cells(row: DeviceRow) -> list[str]:
    largest = row.largest
    plan = None if largest is None else largest.plan
    return [
        row.device,
        "-" if row.limit_bytes is None else format_bytes(row.limit_bytes),
        format_bytes(row.total_bytes),
        {None: "-", True: "yes", False: "no"}[row.fits],
        format_time(row.plan.time_ns),
        "-" if largest is None or largest.batch is None else str(largest.batch),
        "-" if plan is None else format_time(plan.time_ns),
        "-" if plan is None else f"{plan.extra_share:+.1%}",
        "-" if row.samples_per_s is None else f"{row.samples_per_s:,.1f}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
    ]
