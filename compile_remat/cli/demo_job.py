"""The job of the demo: a byte-level GPT that trains on the source of the Python standard library, which every machine has."""

import sysconfig
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import compile_remat
from compile_remat._util.progress import Advance, progress_bar
from compile_remat._util.text_table import format_table
from compile_remat.api import Report
from compile_remat.backend import remat

LOSS_TOLERANCE, MIB = 1e-3, 1 << 20


@dataclass(frozen=True)
class Run:
    """One finished run: last losses in nats per byte; no report of plain torch.compile."""

    name: str
    peak_bytes: int
    step_ms: float
    train_loss: float
    validation_loss: float
    report: Report | None = None


class ByteGPT(nn.Module):
    """A small GPT over bytes; returns the cross entropy of each next byte, so that one graph holds all but the optimizer."""

    def __init__(self, size: Namespace) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.token, self.position = nn.Embedding(256, size.width), nn.Embedding(size.context, size.width)
        self.head = nn.Linear(size.width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.context))

    def forward(self, window: Tensor) -> Tensor:
        """[B, T + 1] -> scalar"""
        x = self.blocks(self.token(window[:, :-1]) + self.position.weight, self.mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), window[:, 1:].flatten())


def windows(text: bytes, size: Namespace, count: int, seed: int) -> Tensor:
    """Returns `count` batches of random windows of the text, each [B, T + 1]; the same seed gives the same windows."""
    if len(text) <= size.context:
        raise SystemExit(f"{len(text)} bytes of text are too few for a context of {size.context}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - size.context, (count, size.batch, 1), generator=generator)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[starts + torch.arange(size.context + 1)].long().to(size.device)


def train(name: str, budget: int | str, size: Namespace, texts: Sequence[bytes], advance: Advance) -> Run:
    """Train from `size.seed`, with plain torch.compile if the budget is 0; measures the second step, and times those after it.

    Only forward and backward are measured, in which only the compiled graphs allocate, as the budget counts: the batch and the
    gradient of the loss exist before.
    """
    torch.compiler.reset()
    compile_remat.reset_reports()
    torch.manual_seed(size.seed)
    model = ByteGPT(size).to(size.device)
    ours: dict[str, Any] = {"backend": remat, "options": {"memory_budget": budget}} if budget else {}
    compiled = torch.compile(model, **ours)
    optimizer, loss_gradient = torch.optim.AdamW(model.parameters()), torch.ones((), device=size.device)
    times_ns, train_loss, measured = list[int](), 0.0, compile_remat.MeasuredStep()
    advance(f"{name}: compiling", 0)
    for step, window in enumerate(windows(texts[0], size, size.steps, size.seed), 1):
        optimizer.zero_grad()
        start_ns = time.perf_counter_ns()
        with compile_remat.measured_step(size.device) if step == 2 else nullcontext(measured) as measured:
            loss = compiled(window)
            loss.backward(loss_gradient)
        optimizer.step()
        train_loss = float(loss.detach())
        del loss
        times_ns.append(time.perf_counter_ns() - start_ns)
        advance(f"{name}: step {step}/{size.steps}, loss {train_loss:.3f}")
    with torch.no_grad():  # without the compiler, so that every run uses the same code
        held_out = [float(model(window)) for window in windows(texts[1], size, 8, seed=1)]
    report = max(compile_remat.reports(), key=lambda each: each.predicted_peak_bytes or 0, default=None)
    return Run(name, measured.peak_bytes or 0, median(times_ns[2:]) / 1e6, train_loss, fmean(held_out), report)


def failures(runs: Sequence[Run]) -> list[str]:
    """Returns a text for each loss that differs from the first run's, and for each peak above its budget."""
    found = []
    for run in runs[1:]:
        for kind in ("train_loss", "validation_loss"):
            ours, plain = getattr(run, kind), getattr(runs[0], kind)
            if not abs(ours - plain) <= LOSS_TOLERANCE * abs(plain):  # also true for nan
                found.append(f"{run.name}: {kind.replace('_', ' ')} {ours:.6f}, plain {plain:.6f}")
        budget_bytes = run.report and run.report.budget_bytes
        if budget_bytes and run.peak_bytes > budget_bytes:
            found.append(f"{run.name}: measured {run.peak_bytes} bytes, budget {budget_bytes}")
    return found


def row(run: Run) -> dict[str, str]:
    """Returns the cells of a run by the titles of their columns."""
    plan, budget_bytes = (run.report.plan, run.report.budget_bytes) if run.report else (None, None)
    extra = plan and f"{plan.recompute_time_ns / 1e6:.1f} ms, {plan.recompute_time_ns / (plan.once_time_ns or 1):.1%}"
    return {
        "run": run.name,
        "measured MiB": f"{run.peak_bytes / MIB:.1f}",
        "predicted MiB": f"{plan.peak_bytes / MIB:.1f}" if plan else "-",
        "budget MiB": f"{budget_bytes / MIB:.1f}" if budget_bytes else "-",
        "step ms": f"{run.step_ms:.0f}",
        "extra recompute": extra or "-",
        "train loss": f"{run.train_loss:.4f}",
        "validation": f"{run.validation_loss:.4f}",
    }


def run(size: Namespace) -> int:
    """Run the job with plain torch.compile and at each budget, print the table, check the losses."""
    if size.width % size.heads:
        raise SystemExit(f"--heads {size.heads} does not divide --width {size.width}")
    if size.steps < 3:
        raise SystemExit(f"--steps {size.steps}: step 1 compiles, step 2 is measured, and it needs a third to time")
    if torch.device(size.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {size.device}: this torch ({torch.__version__}) sees no CUDA device")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in files)[: size.max_bytes]
    texts = text[: len(text) * 19 // 20], text[len(text) * 19 // 20 :]
    print(f"byte-level GPT: {size.layers} blocks, width {size.width}, context {size.context}, batch {size.batch}, "
          f"{size.steps} steps of AdamW, float32\ntext: {len(texts[0]) / MIB:.1f} MiB of the Python standard library, "
          f"{len(texts[1]) / MIB:.1f} MiB more held out\n"
          f"torch {torch.__version__}, {size.device}, {torch.get_num_threads()} threads\n", flush=True)  # fmt: skip
    with progress_bar("training", size.steps * (1 + len(size.budgets))) as advance:
        runs = [train("plain", 0, size, texts, advance)]
        for budget in size.budgets:
            name, floor_bytes = f"remat {budget}", 0
            nbytes = max(MIB, int(budget * runs[0].peak_bytes)) if isinstance(budget, float) else budget
            try:
                runs.append(train(name, nbytes, size, texts, advance))
            except compile_remat.BudgetError as error:
                floor_bytes = int(error.floor_bytes)
                print(
                    f"{name}: the lowest reachable peak is {floor_bytes / MIB:.1f} MiB; training inside that",
                    flush=True,
                )
            if floor_bytes:
                runs.append(train(f"{name}, floor", floor_bytes, size, texts, advance))
    rows = [row(run) for run in runs]
    print(f"\n{format_table('', list(rows[0]), [list(each.values()) for each in rows])}\n")
    failed = [f"FAILED {text}" for text in failures(runs)]
    print("\n".join(failed) or f"losses agree within {LOSS_TOLERANCE:g} (relative), every peak is inside its budget")
    return int(bool(failed))
