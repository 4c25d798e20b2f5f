"""``python -m tests.fuzz.code_peaks --examples 150 --seed 3602``: the lowest plan's peak beside that of the code for it.

Nothing is built and nothing runs, so a program takes seconds and not minutes.  Each program that is predicted worse than `LIMIT` is
made shorter for as long as it stays so, and printed.  The exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.common.code_only import compile_code, peaks_of_rounds, without_compiler
from compile_remat.errors import RematError
from compile_remat.runtime.process_state import clear_process_state
from tests.fuzz.campaign import drawing, use_one_thread
from tests.fuzz.compiled import LEAST_BYTES
from tests.fuzz.models import trials
from tests.fuzz.program import Op, Program
from tests.fuzz.trial import Trial

LIMIT = 0.03
"""Largest tolerated error of a prediction, as a part of the code's peak."""


@dataclass(frozen=True)
class Peaks:
    """Bytes of the lowest plan and of its first code."""

    predicted: int
    emitted: int

    @property
    def error(self) -> float:
        return self.predicted / self.emitted - 1


Measure = Callable[[Program], Peaks | None]


def peaks_of(program: Program) -> Peaks | None:
    """The peaks of a program of one graph; None if no graph is planned, or if the code's peak is unknown."""
    torch.compiler.reset()
    clear_process_state()
    module, inputs = program.module()
    with warnings.catch_warnings(), without_compiler(), peaks_of_rounds() as found:
        warnings.simplefilter("ignore")
        try:
            compile_code(module, inputs, "min")
        except RematError:
            return None
    predicted, emitted = found[0] if found else (None, None)
    return Peaks(predicted, emitted) if predicted and emitted else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.code_peaks", description=__doc__)
    parser.add_argument("--examples", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    use_one_thread()
    found = list(errors_of(arguments.examples, arguments.seed))
    print(summary([peaks.error for _, peaks in found]))
    wrong = {
        peaks: program for program, peaks in found if abs(peaks.error) > LIMIT
    }  # many differ in what does not matter
    for peaks, program in wrong.items():
        shorter = shortened(program, peaks_of_any)
        print(f"\n{peaks.error:+.1%}\n{shorter.source}\n{shorter!r}")
    return int(bool(wrong))


def errors_of(examples: int, seed: int) -> Iterator[tuple[Program, Peaks]]:
    """Random programs of one graph whose code needs at least `LEAST_BYTES`."""
    found: list[tuple[Program, Peaks]] = []

    @drawing(trials("dynamo", "inductor", is_lowered=False), examples, seed)
    def look(trial: Trial) -> None:
        if "graph_break" not in trial.program.kinds:
            peaks = peaks_of(trial.program)
            if peaks is not None and peaks.emitted >= LEAST_BYTES:
                found.append((trial.program, peaks))

    look()
    return iter(found)


def summary(errors: list[float]) -> str:
    """One line."""
    sizes = sorted(map(abs, errors))
    if not sizes:
        return "no peak is known"
    close = sum(size <= LIMIT for size in sizes)
    return (
        f"{len(sizes)} peaks of {LEAST_BYTES >> 10} KiB and more, predicted against emitted code: within {LIMIT:.0%} at {close}, "
        f"median {statistics.median(sizes):.2%}, below by up to {max(0.0, -min(errors)):.1%}, "
        f"above by up to {max(0.0, *errors):.1%}"
    )


def peaks_of_any(program: Program) -> Peaks | None:
    """The same of what is left of a program, which may be wrong; None, too, where it is so small that a few numbers count."""
    try:
        peaks = peaks_of(program)
    except Exception:  # the rest is no program: sizes that do not fit, nothing to train
        return None
    return peaks if peaks is not None and peaks.emitted >= LEAST_BYTES // 4 else None


def shortened(program: Program, measure: Measure) -> Program:
    """A program with fewer instructions, outputs and leaves whose peak is predicted wrong in the same direction."""
    first = measure(program)
    assert first is not None
    shorter: Program | None = program
    while shorter is not None:
        program = shorter
        alike = (p for p in _shorter(program) if (peaks := measure(p)) and _is_like(peaks.error, first.error))
        shorter = next(alike, None)
    return program


def _is_like(error: float, first: float) -> bool:
    return abs(error) > LIMIT and (error > 0) == (first > 0)


def _shorter(program: Program) -> Iterator[Program]:
    """The program without one instruction, whose result something that it reads takes the place of, output or leaf."""
    for i, op in reversed(list(enumerate(program.body))):
        rest = (*program.body[:i], *program.body[i + 1 :])
        for kept in dict.fromkeys(op.args):
            body, outputs = rest, program.outputs
            for out in op.out.split(", "):
                body = tuple(_renamed(other, out, kept) for other in body)
                outputs = tuple(kept if name == out else name for name in outputs)
            yield replace(program, body=body, outputs=tuple(dict.fromkeys(outputs)))
        for j in range(len(op.body) - 1):  # the last one gives a region's result
            inner = replace(op, body=(*op.body[:j], *op.body[j + 1 :]))
            yield replace(program, body=(*program.body[:i], inner, *program.body[i + 1 :]))
    for name in program.outputs if len(program.outputs) > 1 else ():
        yield replace(program, outputs=tuple(other for other in program.outputs if other != name))
    read = {name for op in program.body for inner in op.walk() for name in inner.args} | set(program.outputs)
    unread = [leaf for leaf in program.leaves if leaf.name not in read]
    for leaf in itertools.islice(unread, 1):
        yield replace(program, leaves=tuple(other for other in program.leaves if other != leaf))


def _renamed(op: Op, out: str, kept: str) -> Op:
    args = tuple(kept if name == out else name for name in op.args)
    return replace(op, args=args, body=tuple(_renamed(inner, out, kept) for inner in op.body))


if __name__ == "__main__":
    sys.exit(main())
