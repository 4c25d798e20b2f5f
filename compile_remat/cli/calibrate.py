"""`compile-remat calibrate`: measures this machine's device and writes a file that the setting `device` accepts.

    compile-remat calibrate --out mydevice.json
    REMAT_DEVICE=mydevice.json python train.py

On CPU it measures the processor with the threads that torch uses now (OMP_NUM_THREADS, torch.set_num_threads).
Measure on a quiet machine: other processes on the same cores make every figure too slow.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from compile_remat._util.progress import progress_bar
from compile_remat._util.text_table import format_table

if TYPE_CHECKING:
    from compile_remat.cost_models import Calibration

DEFAULT_SECONDS = 45.0
TOY_SECONDS = 5.0
"""Runs shorter than this use toy sizes, as a smoke test."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; imports nothing heavy."""
    parser.add_argument("--device", default=None, help="cpu or cuda (default cuda where there is one)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write (default DEVICE-calibrated.json)")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        help="how long to measure, beside preparing and compiling (default 45); below 5 tiny kernels run, for a trial",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must lie above 0 and be at most 3600, got {text}")
    return value


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure kernels, fit the device's figures, print measured beside fitted times, and write the file."""
    from datetime import UTC, datetime

    import torch

    from compile_remat._util.atomic_write import write_atomically
    from compile_remat.cost_models import calibrate, load_device, sources_of
    from compile_remat.errors import RematError
    from compile_remat.inductor.inductor_options import compiling_alone

    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise RematError(f"calibrate measures cpu and cuda devices, not {name!r}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RematError("there is no CUDA device here.")
    path: Path = arguments.out or Path(f"{device.type}-calibrated.json")
    with compiling_alone(), progress_bar("calibrating", None) as advance:
        found = calibrate(device, arguments.seconds, advance, is_toy=arguments.seconds < TOY_SECONDS)
    found.content["sources"] = sources_of(device, datetime.now(UTC).strftime("%Y-%m-%d"))
    print(table(found))
    if found.link is not None:
        print(f"\n{found.link}")
    write_atomically(path, json.dumps(rounded(found.content), indent=1) + "\n")
    load_device(str(path))
    print(f"\nwritten to {path}; use it with REMAT_DEVICE={path}")
    return 0


def table(found: "Calibration") -> str:
    """Returns a table of the measured and the fitted time of every kernel, with the error of the fit."""
    model = found.model()
    rows = [
        (p.name, f"{p.measured_ns / 1e3:.1f}", f"{p.fitted_ns(model) / 1e3:.1f}", f"{p.error(model):+.1%}")
        for p in found.points
    ]
    errors = sorted(abs(point.error(model)) for point in found.points)
    lines = format_table("", ("kernel", "measured us", "fitted us", "error"), rows)
    return f"{lines}\n\nmedian error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}, {len(errors)} kernels"


def rounded(content: dict[str, object]) -> dict[str, object]:
    """Returns the content with floats and large ints rounded to four digits, the precision of the measurement."""
    return {key: _rounded(value) for key, value in content.items()}


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(figure) for key, figure in value.items()}
    if isinstance(value, list):
        return [_rounded(figure) for figure in value]
    if isinstance(value, float) and value:
        return float(f"{value:.4g}")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10**9:
        return round(value, 3 - math.floor(math.log10(value)))
    return value
