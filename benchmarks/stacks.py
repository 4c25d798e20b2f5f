"""Fifty steps of training under each tool that people train with, inside a budget and plainly.

    python -m benchmarks.stacks [--tool SFTTrainer] [--json OUT] [--show]

Each tool trains the toy model of its script in examples/stacks three times, in a process of its own: plainly, plainly with another
number of threads, and at a share of plain torch.compile's peak. "difference" is the largest difference of a loss to plain's,
as a share of plain's; "by threads" is that of the two plain runs, from additions in another order. "measured" is the peak of one
forward and backward, "plain" that of plain torch.compile. "extra time" is the planned one, as a share of the step. They are the
figures of `compile_remat.integrations.MemoryReport`.

Rows are stored in OUT one by one, and those that are there already are not made again; `--show` makes none. Tools that are not
installed (`make test-stacks` installs them) have a row that says so.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import compile_remat
from benchmarks.common import harness
from benchmarks.common.torchvision_operators import declare_missing_operators
from compile_remat import MeasuredStep
from compile_remat._util.units import MIB
from compile_remat.integrations import MemoryReport

EXAMPLES = Path(__file__).parents[1] / "examples/stacks"
STEPS = 50
THREADS, OTHER_THREADS = 2, 1
LEAST_DIFFERENCE = 1e-6
"""Losses this close are equal: plain runs with 2 threads and with 1 differ by up to 6e-7 (Fabric), and by nothing where a toy's
loops are too small for two threads; plain runs whose losses add in another order (TRL's own and the model's) differ by 9e-8
in four steps.
"""
TITLES = (
    "tool",
    "losses",
    "difference",
    "by threads",
    "budget MiB",
    "predicted",
    "measured",
    "plain",
    "extra time",
    "verdict",
)

Train = Callable[[Any, float | None], Sequence[float]]
"""Takes the module of the example and the budget; returns the losses."""


@dataclass(frozen=True)
class Tool:
    """One tool: the script that trains with it, and the share of plain's peak."""

    script: str
    train: Train
    budget: float = 0.6


@dataclass(frozen=True)
class StackRow:
    """One tool.

    Attributes:
        steps: The number of losses that were compared, those of validation among them.
        difference: Largest difference of a loss to plain's, as a share of it.
        by_threads: The same between plain runs with 2 threads and with 1.
        skipped: The reason why nothing was measured.
    """

    tool: str
    steps: int = 0
    difference: float = 0.0
    by_threads: float = 0.0
    budget_bytes: int | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    plain_bytes: int | None = None
    extra_share: float | None = None
    skipped: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, or the reason why the row falls short."""
        if self.skipped:
            return self.skipped
        if self.difference > max(self.by_threads, LEAST_DIFFERENCE):
            return "miss: losses differ by more than by threads"
        if self.measured_bytes is None or self.budget_bytes is None:
            return "miss: nothing was measured"
        return "ok" if self.measured_bytes <= self.budget_bytes else "miss: above the budget"


def _trainer(example: Any, budget: float | None, **arguments: Any) -> list[float]:
    run = example.trainer(arguments.pop("model", None) or example.llama(), budget, max_steps=STEPS, **arguments)
    run.add_callback(importlib.import_module("compile_remat.integrations.transformers").MemoryCallback(run))
    run.train()
    found: list[float] = example.losses(run)
    return found


EVEN = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}


def _sft(example: Any, budget: float | None, **arguments: Any) -> list[float]:
    run = example.trainer(budget, max_steps=STEPS, **arguments)
    run.add_callback(example.MemoryCallback(run))
    run.train()
    found: list[float] = example.losses(run)
    return found


def _lightning(example: Any, budget: float | None) -> list[float]:
    found: list[float] = example.fit(
        budget, [example.MemoryCallback()], max_epochs=-1, max_steps=STEPS // 2, enable_checkpointing=False
    )
    return found


TOOLS: Mapping[str, Tool] = {
    "Trainer": Tool("hf_trainer", lambda example, budget: _trainer(example, budget, **EVEN)),
    "SFTTrainer": Tool("trl_sft", _sft),
    "SFTTrainer, own loss": Tool("trl_sft", lambda example, budget: _sft(example, budget, own_loss=True)),
    "PEFT": Tool(
        "hf_trainer",
        lambda example, budget: _trainer(example, budget, model=example.with_lora(example.llama()), **EVEN),
    ),
    "Accelerate": Tool("accelerate_loop", lambda example, budget: example.train(budget, steps=STEPS)),
    "Lightning": Tool("lightning_trainer", _lightning),
    "Fabric": Tool("lightning_trainer", lambda example, budget: example.fabric_loop(budget, steps=STEPS - 1)),
    "timm ResNet": Tool("vision_models", lambda example, budget: example.train("resnet", budget, steps=STEPS), 0.85),
    "timm Swin": Tool("vision_models", lambda example, budget: example.train("swin", budget, steps=STEPS), 0.7),
    "diffusers U-Net": Tool("vision_models", lambda example, budget: example.train("unet", budget, steps=STEPS), 0.7),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.here:
        with redirect_stdout(sys.stderr):
            row = row_of(arguments.tool[0])
        print(json.dumps(asdict(row)))
        return 0
    head, rows = harness.stored_rows(arguments.json, harness.header("cpu"), lambda fields: StackRow(**fields))
    missing = [name for name in arguments.tool or TOOLS if name not in {row.tool for row in rows}]
    for name in () if arguments.show else missing:
        harness.progress(name)
        command = ["benchmarks.stacks", "--here", "--tool", name]
        rows += [StackRow(**fields) for fields in harness.rows_of_process(command)]
        harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)))
    return int(any(row.verdict.startswith("miss") for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", action="append", choices=list(TOOLS), help="may be repeated; default all")
    parser.add_argument("--json", type=Path, metavar="OUT", help="store rows here, and make only what is not there")
    parser.add_argument("--show", action="store_true", help="make nothing, print what is stored")
    parser.add_argument("--here", action="store_true", help="train one tool in this process, and print its row as JSON")
    return parser.parse_args(argv)


def row_of(name: str) -> StackRow:
    """The three runs of one tool."""
    tool = TOOLS[name]
    sys.path.insert(0, str(EXAMPLES))
    declare_missing_operators()
    try:
        example = importlib.import_module(tool.script)
        plain, of_plain = _run(tool, example, None, THREADS)
    except ImportError as error:
        return StackRow(name, skipped=f"not measured: {error}")
    other, _ = _run(tool, example, None, OTHER_THREADS)
    ours, figures = _run(tool, example, tool.budget, THREADS)
    return StackRow(
        *(name, len(plain), largest_difference(ours, plain), largest_difference(other, plain)),
        budget_bytes=_bytes(figures.get("remat_budget_mib")),
        predicted_bytes=_bytes(figures.get("remat_predicted_mib")),
        measured_bytes=_bytes(figures.get("remat_measured_mib")),
        plain_bytes=_bytes(of_plain.get("remat_measured_mib")),
        extra_share=figures.get("remat_extra_share"),
    )


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else round(mib * MIB)


def _run(tool: Tool, example: Any, budget: float | None, threads: int) -> tuple[Sequence[float], dict[str, float]]:
    """Losses of one training, and the figures of the step that its script measured; none if it measured none."""
    torch.compiler.reset()
    compile_remat.reset_reports()
    torch.set_num_threads(threads)
    report = MemoryReport()
    with _noted_steps() as steps:
        losses = tool.train(example, budget)
    report.measured = steps[0] if steps else report.measured
    return losses, report.figures()


@contextmanager
def _noted_steps() -> Iterator[list[MeasuredStep]]:
    """The steps that are measured in the body."""
    steps: list[MeasuredStep] = []
    measure = compile_remat.measured_step

    @contextmanager
    def noted(*arguments: Any) -> Iterator[MeasuredStep]:
        with measure(*arguments) as step:
            steps.append(step)
            yield step

    with mock.patch.object(compile_remat, "measured_step", noted):
        yield steps


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two losses of one step, as a share of the expected one; ValueError if their numbers differ."""
    return max(abs(mine - plain) / abs(plain) for mine, plain in zip(found, expected, strict=True))


def table(rows: Sequence[StackRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each tool."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: StackRow) -> list[str]:
    if row.skipped:
        return [row.tool, *["-"] * (len(TITLES) - 2), row.verdict]
    sizes = [harness.mib(size) for size in (row.budget_bytes, row.predicted_bytes, row.measured_bytes, row.plain_bytes)]
    differences = [f"{row.difference:.1e}", f"{row.by_threads:.1e}"]
    return [row.tool, str(row.steps), *differences, *sizes, harness.percent(row.extra_share), row.verdict]


if __name__ == "__main__":
    sys.exit(main())
