"""Compiles points of several models at once, in processes of their own, and then times them one at a time.

Most of a point's wall time is compilation, which one core does while the device waits. Peaks and gradients do not depend on what
other processes do; times do, so that no process but one runs while they are taken.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.common.contest import Task, differences, tasks, with_times
from benchmarks.common.frontier import Point, cells

COMMAND = (sys.executable, "-m", "benchmarks.common.contest_process")

ROUNDS = 2
"""Times that all points are timed, one after the other, so that a slow spell of the device does not meet one of them alone."""

SHARE_OF_TIME = 0.72
"""Of the time that there is, compilation may take this part; what is not compiled then is left out."""


@dataclass(eq=False)
class _Member:
    """A process with its point."""

    model: str
    task: Task
    process: subprocess.Popen[str]
    gradients: Path
    point: Point | None = None
    times_ns: list[int] = field(default_factory=list)


class Pool:
    """The contests of several models.

    Args:
        fields: Arguments of `Contest` other than its model and its file of gradients.
        folder: For the processes' gradients.
        workers: Processes that compile at once.
        keep: Is called with a model and its points whenever one of them changed.
        keep_kernels: Is called with a model and what `launches.profiled` found of each of its points, at the end.
    """

    def __init__(
        self,
        models: Sequence[str],
        fields: Mapping[str, Any],
        folder: Path,
        workers: int,
        keep: Callable[[str, Sequence[Point]], None],
        keep_kernels: Callable[[str, Mapping[str, Sequence[Any]]], None],
    ) -> None:
        self.models, self.fields, self.folder, self.workers = models, fields, folder, workers
        self.keep, self.keep_kernels = keep, keep_kernels
        self.members: list[_Member] = []
        self._lines: queue.Queue[tuple[_Member, str]] = queue.Queue()

    def points(self, model: str) -> list[Point]:
        """Points of a model measured so far, plain first."""
        return [each.point for each in self.members if each.model == model and each.point is not None]

    def run(self, minutes: float) -> str:
        """Compile, then time; says what was left out."""
        start = time.monotonic()
        with self._ended():
            left_out = self._compile(start + 60 * SHARE_OF_TIME * minutes)
            self._compare()
            rounds = self._time(start + 60 * minutes)
            self._profile(start + 60 * minutes)
        text = f"timed in {rounds} rounds, each point alone"
        return f"{text}; not compiled in time: {', '.join(left_out)}" if left_out else text

    @contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for member in self.members:
                member.process.kill()
                member.process.wait()

    # -- compiling --

    def _compile(self, deadline: float) -> list[str]:
        """Compile until no task is left; returns the names of the points that are not compiled at the deadline."""
        while True:
            running = [member for member in self.members if member.point is None]
            waiting = self._waiting()
            for model, task in waiting[: self.workers - len(running)]:
                running.append(self._begin(model, task))
            if not running:
                return []
            try:
                member, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for member in running:
                    member.process.kill()
                self.members = [member for member in self.members if member.point is not None]
                return [f"{m.model} {m.task.kind} {m.task.setting}" for m in running] + [
                    f"{model} {task.kind} {task.setting}" for model, task in self._waiting()
                ]
            self._take(member, line)

    def _waiting(self) -> list[tuple[str, Task]]:
        """Tasks that can start now, as pairs (model, task), taking the models in turn."""
        found: list[list[tuple[str, Task]]] = []
        for model in self.models:
            begun = {(m.task.kind, m.task.setting) for m in self.members if m.model == model}
            new = [t for t in tasks(self.points(model)) if (t.kind, t.setting) not in begun]
            found.append([(model, task) for task in new])
        return [each[k] for k in range(max(map(len, found), default=0)) for each in found if k < len(each)]

    def _begin(self, model: str, task: Task) -> _Member:
        gradients = self.folder / f"{model} {task.kind} {task.setting}.pt"
        fields = {"name": model, "task": asdict(task), "gradients": str(gradients), **self.fields}
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2", **os.environ}
        process = subprocess.Popen(
            [*COMMAND, json.dumps(fields)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        member = _Member(model, task, process, gradients)
        self.members.append(member)
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()
        return member

    def _listen(self, member: _Member) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            if line[0] in "{[":
                self._lines.put((member, line))
        self._lines.put((member, ""))  # it has ended

    def _take(self, member: _Member, line: str) -> None:
        if member.point is not None:
            return  # an ended process that has told all it had to tell
        if line:
            member.point = Point(**json.loads(line))
        else:
            status = member.process.wait()
            member.point = Point(member.task.kind, member.task.setting, failure=f"ended with status {status}")
        points = self.points(member.model)
        harness.progress(f"{member.model}: {'  '.join(cells(member.point, points, is_timed=False))}")
        self.keep(member.model, points)

    # -- what was compiled --

    def _compare(self) -> None:
        """Each point's gradients with those of plain."""
        for model in self.models:
            mine = [m for m in self.members if m.model == model and m.gradients.exists()]
            plain = next((m for m in mine if m.task.kind == "plain"), None)
            if plain is None:
                continue
            expected = torch.load(plain.gradients, weights_only=True)
            for member in mine:
                assert member.point is not None
                total, worst = differences(torch.load(member.gradients, weights_only=True), expected)
                fields = asdict(member.point) | {"gradient_difference": total, "worst_gradient": worst}
                member.point = Point(**fields)
            self.keep(model, self.points(model))

    def _time(self, deadline: float) -> int:
        """Time all points in turn, `ROUNDS` times or until the deadline; returns the number of finished rounds."""
        ready = [m for m in self.members if m.point is not None and m.point.peak_bytes]
        for done in range(ROUNDS):
            for member in ready:
                if time.monotonic() > deadline:
                    return done
                member.times_ns += self._asked(member, "time", deadline)
                if len(member.times_ns) > 1 and member.point is not None:
                    member.point = with_times(member.point, member.times_ns)
                    self.keep(member.model, self.points(member.model))
        return ROUNDS

    def _profile(self, deadline: float) -> None:
        """Store the launches of each point, where there is time for it."""
        for model in self.models:
            found = {}
            for member in self.members:
                if member.model == model and member.times_ns and time.monotonic() < deadline:
                    found[f"{member.task.kind} {member.task.setting}"] = self._asked(member, "kernels", deadline)
            self.keep_kernels(model, found)

    def _asked(self, member: _Member, what: str, deadline: float) -> list[Any]:
        """The answer of a process; an empty list if the process ends or fails."""
        assert member.process.stdin is not None
        try:
            member.process.stdin.write(f"{what}\n")
            member.process.stdin.flush()
        except BrokenPipeError:
            return []
        while True:
            try:
                other, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()) + 5)
            except queue.Empty:
                return []
            if other is member:
                return list(json.loads(line)) if line else []
