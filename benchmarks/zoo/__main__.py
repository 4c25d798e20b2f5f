"""Architectures of others inside budgets: predicted peaks beside those of the code that Inductor emits, a process for each row.

    python -m benchmarks.zoo [--model NAME] [--setting min] [--sample] [--minutes N] [--timeout 240] [--json OUT] [--fresh]
                             [--dtype bfloat16 | --autocast] [--real]
    python -m benchmarks.zoo --show JSON
    python -m benchmarks.zoo --compare BEFORE AFTER

The models are from transformers, timm, diffusers, torch_geometric and others (extra `zoo`), with random weights, at toy
width and real depth.  Settings are `min`, `max`, and budgets in bytes: 0.6 and 0.4 of plain torch.compile's highest peak.  The
first setting is made of all models before the second.  `--setting advice` refuses a budget of one byte, and then obeys
what the error asks for.  No kernel is built and nothing is measured: peaks are those of the emitted
code, by a dry run.  With `--real` each model trains a step: `measured` is the allocator's peak, and gradients are compared with
eager mode, for models that draw random numbers with plain torch.compile.

Rows are stored in OUT one by one.  A row that is there is kept if it is of the same torch; with `--fresh`, only if it is of the
same sources of ours, too.  `--sample` makes 16 rows in a quarter of an hour.  A model that takes longer than the timeout has a row
that says so.  `--show` sums up a file and lists every row that misses; `--compare` puts two beside each other.

The exit status is 1 if a row that was made or shown misses: a failure, a peak above its budget, a prediction more than 0.5 % off.
"""

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks.common import harness
from benchmarks.common.row_store import Store
from benchmarks.models import DTYPES
from benchmarks.zoo import ENTRIES, SAMPLE, entry_of, summary
from benchmarks.zoo.rows import ADVICE, FAILED, PLAIN, SETTINGS, STALLED, TIMEOUT, ZooRow, is_kept, plain_of, store_of

TIMEOUT_S, PATIENCE = 240, 4
THREADS = "1"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.show:
        return summary.show(arguments.show)
    if arguments.compare:
        return summary.compare(*arguments.compare)
    from compile_remat.partitioning.partitioner import sources_hash

    head = {**harness.header("cpu"), "threads": THREADS}
    harness.print_header(head)
    runner = Runner(store_of(arguments.json, head), arguments, sources_hash()[:12])
    rows = list(runner.rows(_pairs(arguments)))
    print(f"{len(rows)} rows made or found, {runner.left} left for want of time")
    return int(any(summary.miss(row, runner.store.rows) for row in rows))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help="may be repeated; default all")
    parser.add_argument(
        "--setting", action="append", choices=(PLAIN, *SETTINGS, ADVICE), help="may be repeated; default all"
    )
    parser.add_argument("--sample", action="store_true", help="sixteen fixed rows, for every change")
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no row after this time")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"CPU seconds of a row (default {TIMEOUT_S})"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="store rows here, and make only what is not there")
    parser.add_argument("--fresh", action="store_true", help="make rows of other sources of ours again")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what the models train in")
    parser.add_argument(
        "--autocast", action="store_const", const="autocast", dest="dtype", help="the same as --dtype autocast"
    )
    parser.add_argument("--real", action="store_true", help="build the kernels, train, measure")
    parser.add_argument("--show", type=Path, metavar="JSON", help="make nothing, sum up this file")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="make nothing, compare two files"
    )
    return parser.parse_args(argv)


def _pairs(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """The rows that are to be made, as names of models and settings, in order."""
    if arguments.sample:
        return list(SAMPLE)
    names = arguments.model or [entry.name for entry in ENTRIES]
    return [(name, setting) for setting in arguments.setting or SETTINGS for name in names]


class Runner:
    """Makes rows, each in a process of its own, and stores them.

    Attributes:
        left: Number of rows that were not started for lack of time.
    """

    def __init__(self, store: Store[ZooRow], arguments: argparse.Namespace, sources: str) -> None:
        self.store, self._arguments, self._sources, self.left = store, arguments, sources, 0
        self._end = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes

    def rows(self, pairs: Sequence[tuple[str, str]]) -> Iterator[ZooRow]:
        """The rows of models and settings, as they come; a model that fails is tried under plain torch.compile too."""
        for name, setting in pairs:
            if time.monotonic() > self._end:
                self.left += 1
                continue
            row = self._row(name, setting)
            if row is None:
                continue
            yield row
            if row.outcome in (FAILED, TIMEOUT, STALLED) and setting != PLAIN:
                self._known(name, PLAIN)

    def _row(self, name: str, setting: str) -> ZooRow | None:
        """None if plain torch.compile fails, whose row says why, or if the budget is a share of plain's peak and plain has none."""
        plain = (
            self._known(name, PLAIN)
            if setting not in (PLAIN, "min", ADVICE)
            else self.store.find(self._blank(name, PLAIN).run)
        )
        if plain is not None and plain.outcome in (FAILED, TIMEOUT) and setting != PLAIN:
            return None
        budget_bytes = None
        if setting[0].isdigit():
            peak_bytes = None if plain is None else plain.measured_bytes or plain.peak_bytes
            if peak_bytes is None:
                return None
            budget_bytes = int(float(setting) * peak_bytes)
        return self._known(name, setting, budget_bytes)

    def _blank(self, name: str, setting: str, budget_bytes: int | None = None) -> ZooRow:
        entry, given = entry_of(name), self._arguments
        return ZooRow(
            name, entry.library, entry.family, setting, given.dtype, given.real, budget_bytes,
            sources=self._sources, torch=torch.__version__,
        )  # fmt: skip

    def _known(self, name: str, setting: str, budget_bytes: int | None = None) -> ZooRow:
        """The stored row, or one that is made and stored now."""
        blank = self._blank(name, setting, budget_bytes)
        found = self.store.find(blank.run)
        if found is not None and is_kept(found, sources=blank.sources, torch=blank.torch, fresh=self._arguments.fresh):
            return found
        row = self.store.put(in_process(blank, self._arguments.timeout))
        print(summary.line(row, plain_of(row, self.store.rows)), flush=True)
        return row


def in_process(row: ZooRow, timeout_s: float) -> ZooRow:
    """The row, made by a process of its own; one that says so where it ends without a row or takes too long.

    Args:
        timeout_s: CPU seconds of the process; other processes may make it last `PATIENCE` times as long.
    """
    command = [sys.executable, "-m", "benchmarks.zoo.child", json.dumps(asdict(row))]
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "HF_HUB_OFFLINE": "1"}
    limit = (math.ceil(timeout_s), math.ceil(timeout_s) + 5)
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        resource.prlimit(process.pid, resource.RLIMIT_CPU, limit)
        try:
            printed, said = process.communicate(timeout=PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            end(process)
            wall_s = PATIENCE * timeout_s
            return replace(row, outcome=STALLED, failure=f"no end after {wall_s:g} s", wall_s=wall_s)
        except BaseException:  # interrupted: the process is in a session of its own, which no key reaches
            end(process)
            raise
    wall_s = round(time.perf_counter() - start, 1)
    for line in printed.splitlines():
        if line.startswith("{"):
            return ZooRow.of(json.loads(line))
    if process.returncode == -signal.SIGXCPU:
        return replace(row, outcome=TIMEOUT, failure=f"no end after {timeout_s:g} CPU s", wall_s=wall_s)
    last = (said.strip().splitlines() or ["no word"])[-1]
    return replace(row, outcome=FAILED, failure=f"exit status {process.returncode}: {last}", wall_s=wall_s)


def end(process: subprocess.Popen[str]) -> None:
    """End a process, and the compilers that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the process of the row that is being made ends, too
    sys.exit(main())
