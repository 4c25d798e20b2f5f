"""One point of a contest in a process of its own: compiled beside other points, tuned and timed alone, on command.

Run as a module, with one argument: JSON of the arguments of `Contest`, of the `Task`, and a file to lock. The process prints a line
of JSON with the point once the point is compiled and its peak is measured, and then one line for each line on its standard input:
for `time` the times of its steps in nanoseconds, for `kernels` the device's clocks, its launches of a few steps, and the clocks
behind them; an object with `failure` if that failed. The process ends when its input does. If other processes hold the device's
memory, it tries again.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.compile_caches import without_graph_caches
from benchmarks.common.timing import device_times_ns
from benchmarks.contest.device_lock import alone_but_to_compile
from benchmarks.contest.frontier import Point
from benchmarks.contest.launches import profiled
from benchmarks.contest.runs import Contest, Task, failure_of, fresh_state, started

TRIES, PAUSE_S = 8, 5.0
LEAST_STEPS, TIMED_S = 5, 0.7


def main(argv: Sequence[str] | None = None) -> int:
    (text,) = sys.argv[1:] if argv is None else argv
    fields = json.loads(text)
    task, gradients, lock = Task(**fields.pop("task")), Path(fields.pop("gradients")), Path(fields.pop("lock"))
    contest = Contest(gradients=gradients, **fields)
    with without_graph_caches():
        start = time.perf_counter()
        run, point = prepared(contest, task, lock)
        print(json.dumps(asdict(replace(point, wall_s=round(time.perf_counter() - start, 1)))), flush=True)
        for line in sys.stdin:
            if run is not None:
                print(json.dumps(answer(line.strip(), run, contest)), flush=True)
    return 0


def prepared(contest: Contest, task: Task, lock: Path) -> tuple[harness.Training | None, Point]:
    """Compile the point and measure its peak; no training where it failed."""
    torch.zeros((), device=contest.device)  # a GPU's context takes seconds, and disturbs nobody
    for left in reversed(range(TRIES)):
        try:
            with fresh_state(contest.device):
                torch.manual_seed(contest.seed)
            with alone_but_to_compile(lock):
                run, point = contest.prepared(task)
                release(contest)
            return run, point
        except torch.OutOfMemoryError as error:
            point = replace(started(task), **failure_of(error))
        except Exception as error:  # one point must not lose the others
            return None, replace(started(task), **failure_of(error))
        if left:
            time.sleep(PAUSE_S)
    return None, point


def answer(what: str, run: harness.Training, contest: Contest) -> list[Any] | dict[str, str]:
    """The figures that `time` or `kernels` asks for, or why there are none; the device is given free afterwards."""
    measure: dict[str, Callable[[], list[Any]]] = {
        "time": lambda: times_ns(run, contest),
        "kernels": lambda: profiled(run.clear_and_step, contest.device),
    }
    try:
        return measure[what]()
    except Exception as error:  # the process that asked says it
        return {"failure": harness.reason_of(error)}
    finally:
        run.clear()
        release(contest)


def times_ns(run: harness.Training, contest: Contest) -> list[int]:
    """Times of the steps of about TIMED_S seconds, after two that nobody looks at."""
    warm = device_times_ns(run.clear_and_step, 2, contest.device)
    count = max(LEAST_STEPS, int(TIMED_S * 1e9 / max(1, warm[-1]))) if contest.scale == 1 else LEAST_STEPS
    return device_times_ns(run.clear_and_step, count, contest.device)


def release(contest: Contest) -> None:
    """Give what no tensor holds back to the device."""
    gc.collect()
    if contest.is_cuda:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
