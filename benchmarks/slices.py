"""Rows in slices: the lowest peak with and without, the time below the old floor, and how many kernels slices are.

    python -m benchmarks.slices [--case head] [--pairs 12] [--toy] [--json OUT]

Each case is trained at `min`, at `min` with slices="auto", and with slices="auto" inside 0.6 of the first peak.  Peaks are
measured, step times interleaved.  Kernels are the C++ sources of the graph at `min`, whole and in slices; files are what the C++
compiler is called with for a step of either in a process with empty folders, headers included: kernels are built together.  ok: the
peak is at most the case's limit (bytes, or a part of the whole graph's `min`), the 95 % interval of the median time ratio reaches
1.15 or below, files are at most 1.3 times as many.  The exit status is 1 on any miss.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import async_compile
from torch.nn import functional as F

import compile_remat
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.compiler_calls import run_counted
from benchmarks.common.harness import MIB, mib
from benchmarks.common.timing import RatioInterval
from benchmarks.models import Case
from compile_remat.inductor.cpp_kernels.building import KernelsOfGraph

PART = 0.6
TIME_LIMIT = 1.15
FILE_LIMIT = 1.3
MOST_SLICES = 64
LIMITS: dict[str, int | float] = {"head": 16 * MIB, "gpt": 0.45, "long": 0.45}
"""Upper limits on the lowest peak: bytes, or a part of the lowest peak without slices."""


class Head(nn.Module):
    """A layer, a large vocabulary and the loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.layer(x))), labels)


class Attention(nn.Module):
    """Four heads, causal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """``x + down(gelu(up(norm(x))))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Two blocks, with the loss of shifted labels on logits in float32."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(part for _ in range(2) for part in (Attention(width), Layer(width))))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embedding(tokens)))).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Long(nn.Module):
    """One layer on a long sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Layer(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def build(name: str, scale: float, seed: int) -> Case:
    """A case with weights and inputs drawn from `seed`."""
    torch.manual_seed(seed)
    small = scale < 1
    if name == "head":
        rows, width, words = (256, 32, 1024) if small else (2048, 128, 8192)
        return Case(name, Head(width, words), (torch.randn(rows, width), torch.randint(0, words, (rows,))), "")
    if name == "gpt":
        length, width, words = (64, 32, 2048) if small else (1024, 256, 32768)
        tokens = torch.randint(0, words, (4, length))
        return Case(name, Gpt(width, words).bfloat16(), (tokens, tokens), "")
    length, width = (512, 32) if small else (16384, 256)
    return Case(name, Long(width), (torch.randn(1, length, width, requires_grad=True),), "")


@dataclass(frozen=True)
class SliceRow:
    """One case: measured peaks in bytes, the slices that were taken, the time, C++ sources, and files for the compiler.

    Attributes:
        time: Steps inside `PART` of the whole graph's `min`, over steps of that.
        whole_files, sliced_files: Files that the C++ compiler is called with, each counted once; None where they were not.
    """

    case: str
    plain_peak_bytes: int
    whole_peak_bytes: int
    sliced_peak_bytes: int
    predicted_peak_bytes: int
    sliced: str
    part_budget_bytes: int
    part_peak_bytes: int
    part_sliced: str
    time: RatioInterval
    whole_kernels: int
    kernels_of_two: int
    sliced_kernels: int
    whole_files: int | None = None
    sliced_files: int | None = None

    @property
    def verdict(self) -> str:
        limit = LIMITS[self.case]
        limit_bytes = limit if isinstance(limit, int) else limit * self.whole_peak_bytes
        reasons = []
        if self.sliced_peak_bytes > limit_bytes:
            reasons.append(f"min above {mib(int(limit_bytes))} MiB")
        if self.part_peak_bytes > self.part_budget_bytes:
            reasons.append(f"above the budget of {PART}")
        if self.time.low > TIME_LIMIT:
            reasons.append(f"time above {TIME_LIMIT}")
        if self.whole_files is None or self.sliced_files is None:
            reasons.append("files not counted")
        elif self.sliced_files > FILE_LIMIT * self.whole_files:
            reasons.append(f"files for the compiler above {FILE_LIMIT}")
        return "miss: " + "; ".join(reasons) if reasons else "ok"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("rows in slices")
    parser.add_argument("--case", action="append", choices=list(LIMITS), help="may be repeated; default all three")
    parser.add_argument("--pairs", type=int, default=12, help="interleaved pairs of steps (default 12)")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows: list[SliceRow] = []
    with private_compile_caches():
        for name in arguments.case or LIMITS:
            rows.append(row_of(name, arguments))
            harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    return int(any(row.verdict != "ok" for row in rows))


def row_of(name: str, arguments: argparse.Namespace) -> SliceRow:
    """Measure one case."""
    torch.compiler.reset()
    harness.progress(f"{name}: plain torch.compile, min, and min in slices")
    device = arguments.device
    plain_peak, _ = _measured(harness.plain(_case(name, arguments)), device)
    whole = harness.remat(_case(name, arguments), "min")
    whole_peak, _ = _measured(whole, device)
    sliced_peak, at_min = _measured(harness.remat(_case(name, arguments), "min", slices="auto"), device)
    budget_bytes = max(MIB, int(PART * whole_peak))
    harness.progress(f"{name}: {mib(sliced_peak)} of {mib(whole_peak)} MiB; timing {mib(budget_bytes)} MiB")
    part = harness.remat(_case(name, arguments), budget_bytes, slices="auto")
    part_peak, at_part = _measured(part, device)
    time = harness.compare(whole, part, pairs=arguments.pairs, device=device, seed=arguments.seed)
    kernels = [_kernels(lambda s=s: harness.remat(_case(name, arguments), "min", slices=s)) for s in ("off", "2", "64")]
    return SliceRow(
        name,
        plain_peak,
        whole_peak,
        sliced_peak,
        at_min.predicted_peak_bytes or 0,
        _slices(at_min),
        budget_bytes,
        part_peak,
        _slices(at_part),
        time,
        *kernels,
        *(_num_files(name, arguments, number) for number in ("off", str(MOST_SLICES))),
    )


def _case(name: str, arguments: argparse.Namespace) -> Case:
    return _on(arguments.device, build(name, harness.scale_of(arguments), arguments.seed))


def _on(device: str, case: Case) -> Case:
    inputs = tuple(value.to(device).detach().requires_grad_(value.requires_grad) for value in case.inputs)
    return Case(case.name, case.module.to(device), inputs, "")


def _measured(run: harness.Training, device: str) -> tuple[int, compile_remat.Report]:
    compile_remat.reset_reports()
    run.clear_and_step()
    peak = harness.second_step_peak(run, device)
    reports = compile_remat.reports()
    return peak.peak_bytes, reports[-1] if reports else compile_remat.Report("", "", None, None)


def _slices(report: compile_remat.Report) -> str:
    return ", ".join(str(product.slices) for product in report.plan.sliced) if report.plan is not None else ""


def _kernels(make: Callable[[], harness.Training]) -> int:
    """Distinct C++ sources of a step's two graphs; none is built, so the step itself does nothing."""
    sources = set[str]()

    def note(self: object, arguments: Any, source: str, *others: Any, **keywords: Any) -> Callable[..., None]:
        sources.add(source)
        return lambda *values: None

    torch.compiler.reset()
    with (
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", note),
        mock.patch.object(KernelsOfGraph, "cpp_pybinding", note),
    ):
        make().clear_and_step()
    torch.compiler.reset()
    return len(sources)


def _num_files(name: str, arguments: argparse.Namespace, number: str) -> int:
    """Files that the C++ compiler is called with for a step at `min`, in a process of its own with empty folders."""
    own = (name, harness.scale_of(arguments), arguments.seed, arguments.device, number)
    command = [sys.executable, "-c", f"from benchmarks import slices; slices.step_at_min(*{own!r})"]
    with tempfile.TemporaryDirectory(prefix="remat-slices-", ignore_cleanup_errors=True) as folder:
        return len(run_counted(command, Path(folder))[1])


def step_at_min(name: str, scale: float, seed: int, device: str, number: str) -> None:
    """One step of a case at `min`, in so many slices."""
    harness.remat(_on(device, build(name, scale, seed)), "min", slices=number).clear_and_step()


def table(rows: Sequence[SliceRow]) -> tuple[list[str], list[list[str]]]:
    titles = ["case", "plain MiB", "min MiB", "min in slices MiB", "ratio", "predicted MiB", "slices"]
    titles += [f"{PART} of min: MiB", "slices", "time over min", "kernels", "in 2 slices", "in 64 slices"]
    titles += ["files", "in 64 slices", "verdict"]
    cells = [
        [
            row.case,
            mib(row.plain_peak_bytes),
            mib(row.whole_peak_bytes),
            mib(row.sliced_peak_bytes),
            f"{row.sliced_peak_bytes / row.whole_peak_bytes:.3f}",
            mib(row.predicted_peak_bytes),
            row.sliced,
            f"{mib(row.part_peak_bytes)} of {mib(row.part_budget_bytes)}",
            row.part_sliced,
            str(row.time),
            str(row.whole_kernels),
            str(row.kernels_of_two),
            str(row.sliced_kernels),
            *("-" if number is None else str(number) for number in (row.whole_files, row.sliced_files)),
            row.verdict,
        ]
        for row in rows
    ]
    return titles, cells


if __name__ == "__main__":
    sys.exit(main())
