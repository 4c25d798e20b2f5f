"""Live bytes over one training step, under plain torch.compile and under budgets: the picture of the README.

    python -m benchmarks.picture [--model gpt] [--budget 120MiB --budget min] [--toy] [--json OUT] [--out SVG]
    python -m benchmarks.picture --show JSON --out SVG

Every call of the CPU allocator in the second training step (forward and backward, no optimizer) is recorded by torch's profiler.
A curve has `BINS` figures: the step is divided into that many parts of equal duration, and each figure is the most that was live
at once in its part.  `--show` measures nothing and draws a file that `--json` wrote.  Drawing needs matplotlib (the extra `plot`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import MIB, mib
from compile_remat._torch.allocator_events import AllocationEvent, cpu_allocation_events
from compile_remat._util.units import parse_bytes

BINS = 300
BUDGETS = ("120MiB", "min")
COLOURS = ("#8a8a8a", "#1668b8", "#d0661b")


@dataclass(frozen=True)
class Curve:
    """Live bytes over the step of one configuration.

    Attributes:
        setting: "plain", or a memory budget as given.
        level_bytes: The most that was live in each of `BINS` equal parts of the step, above the level at its start.
    """

    model: str
    setting: str
    level_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.level_bytes)

    @property
    def label(self) -> str:
        name = "torch.compile" if self.setting == "plain" else f'backend="remat", memory_budget="{self.setting}"'
        return f"{name}: {mib(self.peak_bytes)} MiB"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.show is not None:
        stored = json.loads(arguments.show.read_text())
        head, curves = stored["header"], [Curve(**row) for row in stored["rows"]]
    else:
        head = harness.header("cpu")
        with private_compile_caches():
            curves = [measured(arguments, setting) for setting in ("plain", *(arguments.budget or BUDGETS))]
        harness.write_json(arguments.json, head, curves)
    harness.print_header(head)
    print(harness.ascii_table(["setting", "peak MiB"], [[curve.setting, mib(curve.peak_bytes)] for curve in curves]))
    if arguments.out is not None:
        draw(curves, arguments.out)
    return 0


def measured(arguments: argparse.Namespace, setting: str) -> Curve:
    """Compile with the first step, record the second."""
    harness.progress(f"{arguments.model}: {setting}")
    torch.compiler.reset()
    case = models.build(arguments.model, scale=harness.scale_of(arguments), seed=arguments.seed)
    run = harness.plain(case) if setting == "plain" else harness.remat(case, setting)
    run.clear_and_step()
    run.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.step()
    return Curve(arguments.model, setting, levels(cpu_allocation_events(profiler)))


def levels(events: Sequence[AllocationEvent], bins: int = BINS) -> tuple[int, ...]:
    """The most live bytes in each of `bins` equal parts of the time from the first event to the last.

    A free of an address that was not allocated among the events is ignored, as in `compile_remat.device.measure.replay`.
    """
    start_ns = events[0].time_ns
    duration_ns = max(1, events[-1].time_ns - start_ns)
    places = [min(bins - 1, (event.time_ns - start_ns) * bins // duration_ns) for event in events]
    most, live, level = [0] * bins, dict[int, int](), 0
    for event, place, following in zip(events, places, [*places[1:], bins - 1], strict=True):
        if event.nbytes > 0:
            live[event.address] = event.nbytes
            level += event.nbytes
        else:
            level -= live.pop(event.address, 0)
        for covered in range(place, following + 1):
            most[covered] = max(most[covered], level)
    return tuple(most)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """The curves over the step, with a dashed line at each budget in bytes; the file's ending says its kind."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "compile-remat", "font.size": 10, "svg.fonttype": "none"})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for curve, colour in zip(curves, COLOURS, strict=False):
        share = [100 * (place + 0.5) / len(curve.level_bytes) for place in range(len(curve.level_bytes))]
        axes.step(share, [nbytes / MIB for nbytes in curve.level_bytes], where="mid", color=colour, label=curve.label)
        if curve.setting[0].isdigit():
            axes.axhline(parse_bytes(curve.setting) / MIB, color=colour, linestyle="--", linewidth=1)
    axes.set(xlabel="training step, % of its duration (forward, then backward)", ylabel="live MiB", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", fontsize=9, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=list(models.CASES))
    parser.add_argument("--budget", action="append", help=f"as memory_budget takes it (default {', '.join(BUDGETS)})")
    parser.add_argument("--toy", action="store_true", help="a tiny model: checks the command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the curves to this file")
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing, draw this file")
    parser.add_argument("--out", type=Path, metavar="SVG", help="draw the picture here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
