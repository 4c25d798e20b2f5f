"""A session on a GPU: calibrate, compile all points at once, time each alone, record launches, check gradients, judge."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from benchmarks.common import harness
from benchmarks.contest import frontier, launches
from benchmarks.contest.frontier import Point
from benchmarks.contest.pool import LAST_WORDS, Pool
from benchmarks.gpu_quick import expected
from benchmarks.gpu_quick.clock import Clock, seconds_of_this_process
from benchmarks.gpu_quick.log import interrupted_by_termination, kept_in
from benchmarks.gpu_quick.verdicts import Judged, Verdict, of_model
from compile_remat._util.atomic_write import write_atomically

FAKE = "fake"
"""The name of the device that is not there: code is emitted for it, and its peaks are those of dry runs."""
FAKE_COMMAND = (sys.executable, "-m", "benchmarks.common.fake_cuda.contest_process")
FAKE_PRICES = "h200"

SHARE = 0.25
"""Of the batch, as of the stored points (benchmarks/results/gpu_h200). One process computes at a time, but each of 19 holds its
weights and its context, 32 GiB in all, and plain, the checkpoints and torch's 0.5 hold what their forwards save while their
backwards are compiled: up to 51 GiB for three models at a quarter of the batch, 200 at all of it. The gradients in float64 take
30 GiB beside them. An H200 has 139."""
DRAWS = 3
"""Batches of images whose gradients are compared: one alone may be near by chance."""
FILES, LARGEST_MIB = 8, 16
"""The most files that a session leaves, and the size of the largest."""


class Session:
    """One session.

    Args:
        arguments: Of the command; `out` is the folder for what is measured.
        head: Of all files.
    """

    def __init__(self, arguments: argparse.Namespace, head: dict[str, str]) -> None:
        self.arguments, self.out = arguments, arguments.out
        self.models: Sequence[str] = arguments.model or expected.MODELS
        self.is_fake = arguments.device == FAKE
        self.judged = self._judged()
        workers = arguments.workers or max(2, (os.cpu_count() or 1) - 1)
        self.options = {"oom_retry": "0", **self._given(), **dict(arguments.option)}
        parts = expected.parts(self.models, workers, is_toy=arguments.toy, runs=not self.is_fake)
        self.clock = Clock(60 * arguments.minutes, parts, seconds_of_this_process())
        self.head = head | {"workers": str(workers), "options": self._options_text()}
        self.workers, self.left_out = workers, list[str]()
        self.calibration, self.convolutions = "", dict[str, object]()
        self.told = list[Verdict]()

    def _judged(self) -> frozenset[Judged]:
        """The figures that are asked for: all on a GPU at full size, peaks of emitted code at any size."""
        if self.is_fake:
            return frozenset({"peaks"})
        is_full = torch.device(self.arguments.device).type == "cuda" and not self.arguments.toy
        return frozenset({"times", "peaks", "gradients"}) if is_full else frozenset()

    def _given(self) -> dict[str, str]:
        """Options of a device that is no GPU: on a CPU g++ takes minutes for code whose times mean nothing."""
        if self.is_fake:
            return {"device": FAKE_PRICES}
        return {"compiler": "eager"} if self.arguments.device == "cpu" else {}

    def run(self) -> int:
        """Do all parts; returns the exit status, 1 if an asked figure is missed."""
        self.out.mkdir(parents=True, exist_ok=True)
        for path in self._files():
            path.unlink(missing_ok=True)
        with kept_in(self.out / "log.txt") as log, interrupted_by_termination():
            harness.print_header(self.head)
            print(
                f"expected to take {self.clock.expected_s:.0f} s of the device, {60 * self.arguments.minutes:.0f} at most"
            )
            print(self.clock.table(), flush=True)
            with tempfile.TemporaryDirectory(prefix="remat-gpu-", ignore_cleanup_errors=True) as folder:
                pool = self._pool(Path(folder))
                try:
                    with pool.ended():
                        self._measure(pool)
                except (Exception, KeyboardInterrupt) as error:  # what is measured is told all the same
                    traceback.print_exc()
                    why = f"{type(error).__name__} {error}"
                    self.told.append(Verdict(f"broken off after {self.clock.spent_s:.0f} s: {why}", False))
                return self._conclude(pool, log)

    def _pool(self, folder: Path) -> Pool:
        fields = {
            "device": self.arguments.device,
            "scale": harness.scale_of(self.arguments),
            "seed": self.arguments.seed,
            "options": self.options,  # calibration adds to them
            "share": self.arguments.share,
            "is_apart": True,
            "draws": DRAWS,
        }
        tasks = partial(expected.tasks, in_float64=not self.is_fake)
        command = FAKE_COMMAND if self.is_fake else ()
        keep, keep_launches = self._keep, partial(launches.append, self.out / "launches.jsonl.gz")
        return Pool(self.models, fields, folder, self.workers, keep, keep_launches, tasks=tasks, command=command)

    def _measure(self, pool: Pool) -> None:
        work = {
            "calibrate": self._calibrate,
            "compile": lambda deadline: self._compile(pool, deadline),
            "time": lambda deadline: _said(pool.time(deadline, expected.VISITS)),
            "launches": lambda deadline: _said(pool.profile(deadline)),
            "time again": lambda deadline: _said(pool.time(deadline, expected.VISITS)),
            "convolutions": self._check_convolutions,
            "picture": lambda deadline: self._draw(pool),
        }
        for part in self.clock.parts:
            self.clock.run(part, work[part.name])
            self._write(self._verdicts(pool))

    # -- the parts --

    def _calibrate(self, deadline: float) -> str:
        path = self.out / "device.json"
        seconds = expected.TOY_CALIBRATED_S if self.arguments.toy else expected.CALIBRATED_S
        flags = ["--device", self.arguments.device, "--seconds", f"{seconds:g}", "--out", str(path)]
        limit_s = min(deadline - time.monotonic(), 2 * self.clock.parts[0].expected_s)
        self.calibration, status = _printed("compile_remat", ["calibrate", *flags], limit_s)
        print(self.calibration)
        if status:
            raise RuntimeError(f"calibrate ended with status {status}; plans are priced by the table of devices")
        if "device" not in self.options:
            self.options["device"] = str(path)
            self.head["options"] = self._options_text()
        return "its device file prices our plans"

    def _compile(self, pool: Pool, deadline: float) -> str:
        self.left_out = pool.compile(deadline)
        pool.compare()
        return f"not compiled in time: {', '.join(self.left_out)}" if self.left_out else "all points"

    def _check_convolutions(self, deadline: float) -> str:
        """With each rewrite by itself: is one to blame for gradients that are not plain's?"""
        limit_s = deadline - time.monotonic()
        flags = [
            "--device",
            self.arguments.device,
            "--compiler",
            "eager",
            "--seeds",
            "2",
            "--seconds",
            f"{limit_s / 2:.0f}",
        ]
        flags += [text for name in ("no rewrites", "split", "all") for text in ("--setting", name)]
        flags += ["--toy", "--model", "resnet", "--dtype", "float32"] if self.arguments.toy else ["--model", "resnet50"]
        with tempfile.TemporaryDirectory(prefix="remat-gpu-") as folder:
            path = Path(folder) / "rows.json"
            try:
                text, status = _printed("benchmarks.conv_gradients", [*flags, "--json", str(path)], limit_s)
            finally:
                self.convolutions = json.loads(path.read_text()) if path.exists() else {}
        print(text)
        lines = [line for line in text.splitlines() if line.startswith(("ok: ", "miss: "))]
        if not lines:
            raise RuntimeError(f"benchmarks.conv_gradients ended with status {status}")
        is_judged = "gradients" in self.judged
        for line in lines:
            is_met, _, what = line.partition(": ")
            self.told.append(Verdict(f"convolutions: {what}", is_met == "ok" if is_judged else None))
        return f"{len(lines)} settings"

    def _draw(self, pool: Pool) -> str:
        points = {model: pool.points(model) for model in self.models}
        is_drawn = frontier.draw(self.out / "frontiers.png", self.head, points)
        return "drawn" if is_drawn else "none: matplotlib is not installed, or nothing was timed"

    # -- what is kept and told --

    def _keep(self, model: str, points: Sequence[Point]) -> None:
        frontier.write(self.out / f"{model}.json", model, self.head, points)

    def _verdicts(self, pool: Pool) -> list[Verdict]:
        found = [Verdict(f"{name}: not compiled in time", False) for name in self.left_out]
        found += [Verdict(f"{part.name}: {part.note}", False) for part in self.clock.parts if part.is_failed]
        return [*found, *(each for m in self.models for each in of_model(m, pool.points(m), self.judged)), *self.told]

    def _write(self, verdicts: Sequence[Verdict]) -> None:
        document = {
            "header": self.head,
            "seconds": round(self.clock.spent_s, 1),
            "parts": [asdict(part) for part in self.clock.parts],
            "verdicts": [asdict(verdict) for verdict in verdicts],
            "calibration": self.calibration.splitlines(),
            "convolutions": self.convolutions,
        }
        write_atomically(self.out / "quick.json", json.dumps(document, indent=1) + "\n")

    def _conclude(self, pool: Pool, log: TextIO) -> int:
        for member in pool.members:
            if member.words:
                log.write(f"\n-- {member.model} {member.name} said:\n{member.words}\n")
        for model in self.models:
            points = pool.points(model)
            print(f"\n{model}\n\n{frontier.table(points, is_timed='times' in self.judged)}\n")
            print("\n".join(frontier.quartiles(points)))
        verdicts = self._verdicts(pool)
        missed = sum(verdict.is_met is False for verdict in verdicts)
        judged = (
            "ok and MISS are asked for"
            if self.judged
            else "nothing is asked for but on a GPU at full size, save that all runs"
        )
        print(f"\n{self.clock.table()}\n\n{judged}:\n" + "\n".join(map(str, verdicts)) + "\n")
        self._write(verdicts)
        sizes = {path.name: path.stat().st_size for path in self._files() if path.exists()}
        print(
            f"{len(sizes)} files in {self.out}: "
            + ", ".join(f"{name} {size >> 10} KiB" for name, size in sizes.items())
        )
        if len(sizes) > FILES or max(sizes.values()) > LARGEST_MIB << 20:
            print(f"more than {FILES} files of {LARGEST_MIB} MiB: some may not come back")
        print(f"took {self.clock.spent_s:.0f} s of the device ({self.head['device']}); missed: {missed}", flush=True)
        return int(bool(missed))

    def _files(self) -> list[Path]:
        names = (
            "device.json",
            *(f"{m}.json" for m in self.models),
            "quick.json",
            "launches.jsonl.gz",
            "frontiers.png",
            "log.txt",
        )
        return [self.out / name for name in names]

    def _options_text(self) -> str:
        shown = {name: Path(value).name if name == "device" else value for name, value in self.options.items()}
        return " ".join(f"{name}={value}" for name, value in sorted(shown.items()))


def _said(is_finished: bool) -> str:
    return "finished" if is_finished else "stopped: its time was over"


def _printed(module: str, flags: Sequence[str], limit_s: float) -> tuple[str, int]:
    """The standard output of a command, and its exit status; why it failed is printed here.

    Raises:
        RuntimeError: It took longer than `limit_s`, and was ended.
    """
    command = [sys.executable, "-m", module, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            text, errors = process.communicate(timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            text, errors = process.communicate()
            raise RuntimeError(
                f"{module} was ended after {limit_s:.0f} s; it had said: {(text + errors)[-500:]}"
            ) from None
        finally:
            process.kill()
    if process.returncode:
        print(errors[-LAST_WORDS:])
    return text, process.returncode
