"""The kernels that a device ran in a few steady training steps, one by one, and the clocks that it ran them at.

A trace of torch's profiler has each kernel with the operator on the host that launched it, and that operator's shapes; a kernel of
Inductor's own is its own operator, named after its FX nodes. Steps before the recorded ones run without a pause, so that the clock
is that of training. On a CPU an operator that no other operator called stands for a kernel.
"""

import gzip
import json
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WARM, STEPS = 5, 3
"""Steps before those that are recorded, and recorded steps."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes:
        step: The number of its step, from 0.
        operator: The operator that launched it; "" if not known.
        shapes: Shapes of the operator's arguments; empty if not known.
    """

    step: int
    name: str
    time_ns: int
    operator: str = ""
    shapes: tuple[Any, ...] = ()


def recorded(step: Callable[[], object], device: str) -> list[Launch]:
    """The launches of `STEPS` steps, in the order in which they ran."""
    is_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with tempfile.TemporaryDirectory(prefix="remat-trace-") as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(wait=0, warmup=WARM, active=STEPS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for done in range(1, WARM + STEPS + 1):
                step()
                if is_cuda and done == WARM + STEPS:
                    torch.cuda.synchronize(device)
                profiler.step()
        return of_trace(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], is_cuda=is_cuda)


def of_trace(events: Sequence[Mapping[str, Any]], *, is_cuda: bool) -> list[Launch]:
    """The launches of a trace of the profiler."""
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: float(e["ts"]))
    steps = [float(e["ts"]) for e in spans if e.get("cat") == "user_annotation" and "ProfilerStep" in e["name"]]
    hosts = [e for e in spans if e.get("cat") == "cpu_op"]
    by_id = {e["args"].get("External id"): e for e in hosts}
    found: list[Launch] = []
    for event in [e for e in spans if e.get("cat") in _ON_DEVICE] if is_cuda else _outermost(hosts):
        host = by_id.get(event["args"].get("External id")) if is_cuda else event
        if host is None:  # such as a copy that no operator asked for: it belongs to the step that runs
            number = found[-1].step if found else 0
            found.append(Launch(number, event["name"], round(1000 * event["dur"])))
            continue
        number = max(0, bisect_right(steps, float(host["ts"])) - 1)
        shapes = tuple(host["args"].get("Input Dims", ()))
        found.append(Launch(number, event["name"], round(1000 * event["dur"]), host["name"], shapes))
    return found


def _outermost(hosts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Operators of torch, sorted by their start, without those that one of their thread called; the engines' own spans are none."""
    found, ends = [], dict[Any, float]()
    for event in hosts:
        is_operator = "::" in event["name"] and not event["name"].startswith("autograd::")
        if is_operator and float(event["ts"]) >= ends.get(event["tid"], 0.0):
            found.append(event)
            ends[event["tid"]] = float(event["ts"]) + float(event["dur"])
    return found


def sums(launches: Sequence[Launch]) -> list[tuple[str, int, int]]:
    """Name, nanoseconds and number of runs of each kernel of a step, the longest first: means over the recorded steps."""
    steps = max(1, len({launch.step for launch in launches}))
    times_ns, counts = Counter[str](), Counter[str]()
    for launch in launches:
        times_ns[launch.name] += launch.time_ns
        counts[launch.name] += 1
    return [
        (name, round(time_ns / steps), max(1, round(counts[name] / steps))) for name, time_ns in times_ns.most_common()
    ]


def clocks(device: str) -> dict[str, float] | None:
    """Clocks in MHz, power in W and temperature in degrees Celsius, by the driver's tool; None if there is no such tool or GPU."""
    if torch.device(device).type != "cuda":
        return None
    query = ["nvidia-smi", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits"]
    index = torch.device(device).index or 0
    try:
        answer = subprocess.run([*query, f"--id={index}"], capture_output=True, text=True, timeout=10, check=True)
        return dict(zip(_CLOCKS, map(float, answer.stdout.strip().split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def profiled(step: Callable[[], object], device: str) -> list[Any]:
    """As data of JSON: the clocks before, the launches, and the clocks behind them."""
    before = clocks(device)
    rows = [astuple(launch) for launch in recorded(step, device)]
    return [before, rows, clocks(device)]


def append(path: Path, model: str, point: str, found: Sequence[Any]) -> None:
    """Append what was profiled of a point to a file: a line of JSON, compressed for itself, so that no line needs the next."""
    before, rows, after = found
    line = {
        "model": model,
        "point": point,
        "clocks_before": before,
        "clocks_after": after,
        "kernels": sums([Launch(*row) for row in rows]),
        "launches": rows,
    }
    with path.open("ab") as file:
        file.write(gzip.compress((json.dumps(line) + "\n").encode()))
