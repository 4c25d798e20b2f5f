"""`compile-remat demo`: one training job three times, with plain torch.compile and inside two byte budgets.

Seed, data and model are the same; only the backend differs, so the losses must agree. By default the budgets are
fractions of the plain run's measured peak, passed in bytes. The exit status is 0 if all losses agree and every measured
peak is inside its budget.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_remat._util.progress import Advance, progress_bar
from compile_remat._util.text_table import format_table

if TYPE_CHECKING:
    from compile_remat.cli.demo_job import Compile, JobResult, JobSize, Text

LOSS_TOLERANCE = 1e-3
_MIB = 1 << 20
_DEFAULT_BUDGETS = "0.5,0.3"


@dataclass(frozen=True)
class DemoRun:
    """One finished run: its budget, its measurements and the backend's report (None for the plain run)."""

    name: str
    budget_bytes: int | None
    result: "JobResult"
    report: Any = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the demo; imports nothing heavy."""
    parser.add_argument("--layers", type=_positive, default=12, help="blocks of the GPT (default 12)")
    parser.add_argument("--width", type=_positive, default=192, help="width of the model (default 192)")
    parser.add_argument("--heads", type=_positive, default=4, help="heads, a divisor of the width (default 4)")
    parser.add_argument("--context", type=_positive, default=128, help="bytes of context (default 128)")
    parser.add_argument("--batch", type=_positive, default=8, help="sequences in a step (default 8)")
    parser.add_argument("--steps", type=_positive, default=40, help="training steps of each run (default 40)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--max-bytes", type=_positive, default=4 << 20, help="how much text to read (default 4 MiB)")
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=_budgets(_DEFAULT_BUDGETS),
        metavar="LIST",
        help=f"fractions of the plain run's measured peak, or sizes such as 90MiB (default {_DEFAULT_BUDGETS})",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _budgets(text: str) -> tuple[float | str, ...]:
    return tuple(_budget(part.strip()) for part in text.split(","))


def _budget(text: str) -> float | str:
    """Returns a fraction as a float; any other text unchanged, for the backend to parse."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"a fraction must lie in (0, 1], got {text}; give a size a unit, as in 90MiB")
    return value


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the job with plain torch.compile and at each budget, print the table, check the losses."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints two lines on stderr each time otherwise
    import torch

    from compile_remat.cli import demo_job

    size = _job_size(arguments)
    text = demo_job.load_text(demo_job.standard_library_files(max_bytes=arguments.max_bytes))
    _introduce(text, size)
    with progress_bar("training", size.steps * (1 + len(arguments.budgets))) as bar:
        plain = DemoRun("plain", None, _train("plain torch.compile", text, size, torch.compile, bar))
        runs = [plain]
        for budget in arguments.budgets:
            runs.append(_run_inside(budget, plain.result.peak.peak_bytes, text, size, bar))
    print(table(runs))
    return _conclude(runs)


def _job_size(arguments: argparse.Namespace) -> "JobSize":
    import torch

    from compile_remat.cli.demo_job import JobSize

    if arguments.width % arguments.heads:
        raise SystemExit(f"--heads {arguments.heads} does not divide --width {arguments.width}")
    if arguments.steps < 3:
        raise SystemExit(
            f"--steps {arguments.steps}: step 1 compiles, step 2 is measured, and it needs a third to time"
        )
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {arguments.device}: this torch ({torch.__version__}) sees no CUDA device")
    fields = ("layers", "width", "heads", "context", "batch", "steps", "seed", "device")
    return JobSize(**{name: getattr(arguments, name) for name in fields})


def _introduce(text: "Text", size: "JobSize") -> None:
    import torch

    print(f"byte-level GPT: {size.layers} blocks, width {size.width}, context {size.context}, batch {size.batch}, "
          f"{size.steps} steps of AdamW, float32")  # fmt: skip
    print(f"text: {len(text.train_files)} files of the Python standard library ({len(text.train) / _MIB:.1f} MiB), "
          f"{len(text.validation_files)} more held out ({len(text.validation) / _MIB:.1f} MiB)")  # fmt: skip
    print(f"torch {torch.__version__}, {size.device}, {torch.get_num_threads()} threads\n", flush=True)


def _train(name: str, text: "Text", size: "JobSize", compile_module: "Compile", advance: Advance) -> "JobResult":
    """Run the job once from a fresh compiler state."""
    import torch

    from compile_remat.cli.demo_job import train

    torch.compiler.reset()
    advance(f"{name}: compiling", 0)
    return train(
        text, size, compile_module, lambda step, loss: advance(f"{name}: step {step}/{size.steps}, loss {loss:.3f}")
    )


def _run_inside(budget: float | str, plain_peak: int, text: "Text", size: "JobSize", advance: Advance) -> DemoRun:
    """Train inside one budget; if it is below the lowest reachable peak, train inside that peak instead."""
    from compile_remat import BudgetError

    # The backend refuses an int below 1 MiB (as a forgotten unit); a fraction of a tiny model's peak may be that small.
    memory_budget: int | str = max(_MIB, int(budget * plain_peak)) if isinstance(budget, float) else budget
    name = f"remat {budget}" if isinstance(budget, str) else f"remat {budget:g}"
    try:
        return _run_remat(name, memory_budget, text, size, advance)
    except BudgetError as error:
        floor_bytes = int(error.floor_bytes)
    print(f"{name}: the lowest reachable peak is {floor_bytes / _MIB:.1f} MiB; training inside that", flush=True)
    return _run_remat(f"{name}, floor", floor_bytes, text, size, advance)


def _run_remat(name: str, memory_budget: int | str, text: "Text", size: "JobSize", advance: Advance) -> DemoRun:
    import torch

    import compile_remat

    compile_remat.reset_reports()
    options: dict[str, Any] = {"memory_budget": memory_budget}
    result = _train(name, text, size, lambda m: torch.compile(m, backend=_backend(), options=options), advance)
    report = max(compile_remat.reports(), key=lambda each: each.predicted_peak_bytes or 0)
    return DemoRun(name, report.budget_bytes, result, report)


def _backend() -> Any:
    """Returns the backend's name if it is registered; else the function, since a checkout without installation has no name."""
    import torch

    if "remat" in torch.compiler.list_backends():
        return "remat"
    from compile_remat.backend import remat

    return remat


def table(runs: Sequence[DemoRun]) -> str:
    """Returns an ASCII table of the runs, sizes in MiB."""
    titles = (
        "run", "measured MiB", "predicted MiB", "budget MiB", "step ms", "extra recompute", "train loss", "validation",
    )  # fmt: skip
    return f"\n{format_table('', titles, [_cells(run) for run in runs])}\n"


def _cells(run: DemoRun) -> tuple[str, ...]:
    plan = None if run.report is None else run.report.plan
    extra = "-"
    if plan is not None:
        share = plan.recompute_time_ns / plan.step_time_ns if plan.step_time_ns else 0.0
        extra = f"{plan.recompute_time_ns / 1e6:.1f} ms, {share:.1%}"
    return (
        run.name,
        f"{run.result.peak.peak_bytes / _MIB:.1f}",
        "-" if plan is None else f"{plan.peak_bytes / _MIB:.1f}",
        "-" if run.budget_bytes is None else f"{run.budget_bytes / _MIB:.1f}",
        f"{run.result.step_ns / 1e6:.0f}",
        extra,
        f"{run.result.losses[-1]:.4f}",
        f"{run.result.validation_loss:.4f}",
    )


def disagreements(runs: Sequence[DemoRun], tolerance: float = LOSS_TOLERANCE) -> list[str]:
    """Returns a text for each last training or validation loss that differs relatively by over `tolerance` from the first run's."""
    plain = runs[0].result
    found = []
    for run in runs[1:]:
        pairs = (
            ("train loss", run.result.losses[-1], plain.losses[-1]),
            ("validation loss", run.result.validation_loss, plain.validation_loss),
        )
        for what, ours, theirs in pairs:
            if not abs(ours - theirs) <= tolerance * abs(theirs):  # also true for nan
                found.append(f"{run.name}: {what} {ours:.6f}, plain {theirs:.6f}")
    return found


def _conclude(runs: Sequence[DemoRun]) -> int:
    problems = disagreements(runs)
    problems += [
        f"{run.name}: measured {run.result.peak.peak_bytes} bytes, budget {run.budget_bytes}"
        for run in runs
        if run.budget_bytes is not None and run.result.peak.peak_bytes > run.budget_bytes
    ]
    for problem in problems:
        print(f"FAILED {problem}")
    if not problems:
        print(f"losses agree within {LOSS_TOLERANCE:g} (relative), every peak is inside its budget")
    return int(bool(problems))
