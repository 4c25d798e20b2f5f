"""``python -m tests.fuzz --examples 5000``: random models for as long as you like; failures end up in a file, shrunk."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import torch

from tests.fuzz.campaign import Result, run, use_one_thread
from tests.fuzz.compiled import LEAST_BYTES
from tests.fuzz.kinds import GROUPS

WORST = 12
"""Programs whose peaks are predicted worst that the summary shows."""

CHUNK = {"graph, eager": 50, "dynamo, eager": 25, "dynamo, inductor": 10}


def main() -> int:
    """Exit status 1 where anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: a new one")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--dynamo-share", type=float, default=0.2, help="part that enters through torch.compile")
    parser.add_argument(
        "--lowered-share", type=float, default=0.25, help="part of both with early gradients and slices"
    )
    parser.add_argument("--inductor-share", type=float, default=0.01, help="part that Inductor compiles")
    parser.add_argument(
        "--failures", type=Path, default=Path("fuzz_failures.txt"), help="where failing trials are added"
    )
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, torch {torch.__version__}", flush=True)
    total = campaign(arguments)
    print(summary(total))
    return 1 if total.failures else 0


def campaign(arguments: argparse.Namespace) -> Result:
    """All chunks, a few processes at a time."""
    total, start, seen = Result(), time.monotonic(), set[str]()
    chunks = _chunks(arguments)
    # A fresh process: torch's threads do not survive a fork.
    with ProcessPoolExecutor(arguments.workers, get_context("spawn"), use_one_thread, max_tasks_per_child=20) as pool:
        running: set[Future[Result]] = set()
        while True:
            for chunk in chunks:
                running.add(pool.submit(run, *chunk))
                if len(running) >= arguments.workers:
                    break
            if not running:
                return total
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                total.add(future.result())
            for error in total.failures.keys() - seen:
                _save(arguments.failures, error, total.failures[error])
            seen |= total.failures.keys()
            ran, seconds = sum(total.ran.values()), time.monotonic() - start
            print(f"{ran} programs, {len(total.failures)} failures, {seconds:.0f} s", flush=True)


def _chunks(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, int, bool]]:
    inductor = round(arguments.examples * arguments.inductor_share)
    dynamo = round(arguments.examples * arguments.dynamo_share)
    left = Counter({"dynamo, inductor": inductor, "dynamo, eager": dynamo})
    left["graph, eager"] = arguments.examples - inductor - dynamo
    for name in ("dynamo, inductor", "dynamo, eager"):
        left[f"{name}, lowered"] = round(left[name] * arguments.lowered_share)
        left[name] -= left[f"{name}, lowered"]
    seed = arguments.seed * 100_000
    while any(left.values()):
        for name in [name for name, count in left.items() if count]:
            entry, compiler, *more = name.split(", ")
            size = min(CHUNK[f"{entry}, {compiler}"], left[name])
            left[name] -= size
            seed += 1
            yield entry, compiler, size, seed, bool(more)


def _save(path: Path, error: str, literal: str) -> None:
    with path.open("a") as file:
        file.write(f"# {error}\n{literal}\n\n")
    print(f"FAILED: {error}\n{literal}", flush=True)


def summary(total: Result) -> str:
    """Counts, by entry, by plan and by kind of instruction."""
    lines = [f"{sum(total.ran.values())} programs: {_counts(total.ran)}"]
    lines.append(f"{sum(total.plans.values())} plans: {_counts(total.plans)}")
    lines.append(f"{sum(total.kinds.values())} instructions:")
    known = {kind for group in GROUPS.values() for kind in group}
    groups = {**GROUPS, "region": {kind: "" for kind in total.kinds if kind not in known}}
    for name, group in groups.items():
        counts = Counter({kind: total.kinds[kind] for kind in group})
        lines.append(f"  {name} {sum(counts.values())}: {_counts(counts)}")
    lines += promises(total)
    lines.append(f"{len(total.failures)} failures")
    lines += [f"  {error}" for error in total.failures]
    return "\n".join(lines)


def promises(total: Result) -> list[str]:
    """Lines on the budgets of the programs that Inductor compiled, and on the errors of the predicted peaks."""
    if not total.outcomes:
        return []
    lines = [f"{len(total.outcomes)} budgets: {_counts(Counter(outcome.budget for outcome, _ in total.outcomes))}"]
    errors = [(outcome.error, outcome, literal) for outcome, literal in total.outcomes if outcome.error is not None]
    errors.sort(key=lambda row: -abs(row[0]))
    if errors:
        sizes = [abs(error) for error, _, _ in errors]
        lines.append(
            f"{len(errors)} peaks of {LEAST_BYTES >> 10} KiB and more, predicted against measured: "
            f"median {statistics.median(sizes):.2%}, 90 % within {sorted(sizes)[int(0.9 * len(sizes))]:.1%}, "
            f"below by up to {max(0.0, -min(error for error, _, _ in errors)):.1%}, "
            f"above by up to {max(0.0, max(error for error, _, _ in errors)):.1%}; the worst:"
        )
        lines += [f"  {error:+.1%} {outcome} {literal}" for error, outcome, literal in errors[:WORST]]
    return lines


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


if __name__ == "__main__":
    sys.exit(main())
