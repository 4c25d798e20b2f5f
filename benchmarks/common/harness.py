"""Code that all benchmarks share: one training step, compiled and measured; header, ASCII table, JSON.

The step that is measured: gradients None at entry, `module(*inputs)`, mean of the output unless it is a scalar already,
`backward()`. No optimizer. The first step compiles, the second one is measured.  An output in bfloat16 or float16 is handed the
mean's gradient instead: on a CPU the mean itself takes a copy in float32, which lies outside of the model.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from benchmarks.common.timing import RatioInterval, interleaved_ratio, step_times_ns
from benchmarks.models import TOY_SCALE, Case
from compile_remat.device.measure import Peak, peak_bytes

R = TypeVar("R")
MIB = 1 << 20
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Training:
    """A compiled module with its inputs: something that can take a step.

    With `holds_output` the step's output lives until its end, as in a loop that goes on to use it; the loss's gradient of it
    lies beside it then.
    """

    module: nn.Module
    compiled: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    holds_output: bool = False

    def clear(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def step(self) -> None:
        """Forward and backward; the output dies before the backward starts, if it is not held."""
        output = self.compiled(*self.inputs)
        if output.ndim and output.dtype in LOW_PRECISION:
            roots, gradients = (get_gradient_edge(output),), (torch.full_like(output, 1 / output.numel()),)
        else:
            roots, gradients = (get_gradient_edge(self.loss(output)),), None
        if not self.holds_output:
            del output
        torch.autograd.backward(roots, gradients)

    def clear_and_step(self) -> None:
        self.clear()
        self.step()

    @staticmethod
    def loss(out: Tensor) -> Tensor:
        return out if out.ndim == 0 else out.mean()


@dataclass(frozen=True)
class Measured:
    """One compiled configuration: its peak from the second step on, the gradients' bytes in the peak, median step time."""

    peak: Peak
    gradient_bytes: int
    step_ns: int
    first_step_s: float


def training(case: Case, **compile_arguments: Any) -> Training:
    """The case under `torch.compile`; `compile_arguments` are torch.compile's (`backend`, `options`)."""
    return Training(case.module, torch.compile(case.module, **compile_arguments), case.inputs)


def plain(case: Case) -> Training:
    """The case under torch.compile with default options."""
    return training(case)


def plain_again(case: Case) -> Training:
    """Plain torch.compile, really compiled a second time: Dynamo would reuse the first's code for an equal module and backend,
    so this backend sets an option to its default value."""
    return training(case, options={"trace.enabled": False})


def remat(case: Case, memory_budget: int | str, **options: str) -> Training:
    """The case under our backend. The function, not its name: this runs from a checkout that is not installed too."""
    from compile_remat.backend import remat as backend

    return training(case, backend=backend, options={"memory_budget": memory_budget, **options})


def measure(run: Training, device: str, repeats: int) -> Measured:
    """Compile with the first step, measure the peak of the next, then time `repeats` steps."""
    start = time.perf_counter()
    run.clear_and_step()
    first_step_s = time.perf_counter() - start
    peak = second_step_peak(run, device)
    times = step_times_ns(run.clear_and_step, repeats, device)
    gradients = [p.grad for p in run.module.parameters() if p.grad is not None]
    run.clear()
    return Measured(peak, sum(g.nbytes for g in gradients), int(statistics.median(times)), first_step_s)


def second_step_peak(run: Training, device: str) -> Peak:
    run.clear()
    peak = peak_bytes(run.step, device)
    run.clear()
    return peak


def compare(base: Training, other: Training, *, pairs: int, device: str, seed: int) -> RatioInterval:
    """Interleaved step times, other / base; both have taken their first step already."""
    for _ in range(2):
        base.clear_and_step()
        other.clear_and_step()
    return interleaved_ratio(base.clear_and_step, other.clear_and_step, pairs, device, seed)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    result.add_argument("--toy", action="store_true", help="tiny models: checks the command, not the claims")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--json", type=Path, metavar="OUT", help="also write everything to this file")
    return result


def parser_of_stored_rows(
    description: str | None, models: Iterable[str], dtypes: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The options of benchmarks that store their rows one by one, and make only those that are not there."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", action="append", choices=list(models), help="may be repeated; default all")
    if dtypes:
        result.add_argument("--dtype", action="append", choices=dtypes, help="may be repeated; default all")
    result.add_argument("--json", type=Path, metavar="OUT", help="store rows here, and make only what is not there")
    result.add_argument("--show", action="store_true", help="make nothing, print what is stored")
    return result


def stored_rows(
    path: Path | None, head: dict[str, str], make: Callable[[dict[str, Any]], R]
) -> tuple[dict[str, str], list[R]]:
    """Header and rows that an earlier call stored; `head` and no rows if there is no file."""
    if path is None or not path.exists():
        return head, []
    document = json.loads(path.read_text())
    return document["header"], [make(fields) for fields in document["rows"]]


def rows_of_process(command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Lines of JSON that a process of its own prints, as they come.

    Args:
        command: A module and its arguments.

    Raises:
        RuntimeError: The process failed.
    """
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")


def scale_of(arguments: argparse.Namespace) -> float:
    return TOY_SCALE if arguments.toy else 1.0


def header(device: str) -> dict[str, str]:
    """Device, versions and time of the measurement, and the load of other processes on the machine.

    One other busy process on two cores made a step five times slower: its threads wait for each other at every loop.
    """
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _cpu_name()
    return {
        "device": f"{device} ({name})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.2f} in the last minute" if hasattr(os, "getloadavg") else "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_header(values: dict[str, str]) -> None:
    print("\n".join(f"{key + ':':<9}{value}" for key, value in values.items()) + "\n")


def ascii_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first and the last left-aligned, the rest right-aligned."""
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    last = len(titles) - 1

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i in (0, last) else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(titles), "  ".join("-" * width for width in widths), *map(line, rows)])


def write_json(path: Path | None, head: dict[str, str], rows: Sequence[Any]) -> None:
    """`rows` are dataclass values."""
    if path is not None:
        path.write_text(json.dumps({"header": head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def progress(text: str) -> None:
    """Slow commands say what they are doing, apart from the table."""
    print(text, file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """The innermost error of those that Dynamo and Inductor wrapped, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()).partition(" from user code:")[0]  # what follows are paths of this machine
    return f"{type(error).__name__}: {text}"[:2000]


def mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:.1f}"


def ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction * 100:.1f}%"
