"""One point of a contest in a process of its own: compiled beside other points, timed alone, on command.

Run as a module, with one argument: JSON of the arguments of `Contest` and of the `Task`. The process prints a line of JSON with the
point once the point is compiled and its peak is measured, and then one line for each line on its standard input: for `time` the
times of its steps in nanoseconds, for `kernels` the device's clocks, its launches of a few steps, and the clocks behind them. The
process ends when its input does. If other processes hold the device's memory, it tries again.
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.compile_caches import without_graph_caches
from benchmarks.common.contest import Contest, Task, failure_of, fresh_state, started
from benchmarks.common.frontier import Point
from benchmarks.common.launches import profiled
from benchmarks.common.timing import device_times_ns

TRIES, PAUSE_S = 8, 5.0
LEAST_STEPS, TIMED_S = 5, 0.7


def main(argv: Sequence[str] | None = None) -> int:
    (text,) = sys.argv[1:] if argv is None else argv
    fields = json.loads(text)
    task, gradients = Task(**fields.pop("task")), Path(fields.pop("gradients"))
    contest = Contest(gradients=gradients, **fields)
    with without_graph_caches():
        start = time.perf_counter()
        run, point = prepared(contest, task)
        print(json.dumps(asdict(replace(point, wall_s=round(time.perf_counter() - start, 1)))), flush=True)
        for line in sys.stdin:
            if run is not None:
                answer = kernels(run, contest) if line.strip() == "kernels" else times_ns(run, contest)
                print(json.dumps(answer), flush=True)
    return 0


def prepared(contest: Contest, task: Task) -> tuple[harness.Training | None, Point]:
    """Compile the point and measure its peak; no training where it failed."""
    for left in reversed(range(TRIES)):
        with fresh_state(contest.device):
            torch.manual_seed(contest.seed)
        try:
            run, point = contest.prepared(task)
            gc.collect()
            if contest.is_cuda:
                torch.cuda.empty_cache()
            return run, point
        except torch.OutOfMemoryError as error:
            point = replace(started(task), **failure_of(error))
        except Exception as error:  # one point must not lose the others
            return None, replace(started(task), **failure_of(error))
        if left:
            time.sleep(PAUSE_S)
    return None, point


def kernels(run: harness.Training, contest: Contest) -> list[Any]:
    """Clocks, launches and clocks, see `launches.profiled`; the device is given free afterwards."""
    found = profiled(run.clear_and_step, contest.device)
    run.clear()
    if contest.is_cuda:
        torch.cuda.empty_cache()
    return found


def times_ns(run: harness.Training, contest: Contest) -> list[int]:
    """Times of the steps of about TIMED_S seconds, after two that nobody looks at; the device is given free afterwards."""
    warm = device_times_ns(run.clear_and_step, 2, contest.device)
    count = max(LEAST_STEPS, int(TIMED_S * 1e9 / max(1, warm[-1]))) if contest.scale == 1 else LEAST_STEPS
    found = device_times_ns(run.clear_and_step, count, contest.device)
    run.clear()
    if contest.is_cuda:
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    sys.exit(main())
