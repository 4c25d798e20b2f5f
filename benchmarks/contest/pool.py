"""Compiles points of several models at once, in processes of their own, and then times them one at a time.

Most of a point's wall time is compilation, which one core does while the device waits. Peaks and gradients do not depend on what
other processes do; times do, so that no process but one computes while they are taken, or while kernels are tuned.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.contest.frontier import Point, cells
from benchmarks.contest.runs import EXACT, Task, differences, tasks, with_times

COMMAND = (sys.executable, "-m", "benchmarks.contest.process")

ROUNDS = 2
"""Times that all points are timed, one after the other, so that a slow spell of the device does not meet one of them alone."""

SHARE_OF_TIME = 0.72
"""Of the time that there is, compilation may take this part; what is not compiled then is left out."""

ANSWER_S = 60.0
"""A process that says nothing for so long after it was asked is ended."""
LATE_S = 5.0
"""So much later than the deadline may an answer come."""

ASKED_S = {"time": 3.0, "kernels": 8.0}
"""A first answer may take so long; the next one as long as the longest before it."""

TOLD_EVERY_S = 30.0
LAST_WORDS = 4000
"""Characters of what a process said on its standard error that are kept, its last ones."""


class Member:
    """A process with its point, which is None until the process has handed it over.

    Attributes:
        gradients: The file that the process writes its gradients to.
        log: The file that has what it says on standard error.
        times_ns: Times of its steps, a list for each visit.
    """

    def __init__(self, model: str, task: Task, folder: Path, command: Sequence[str], fields: Mapping[str, Any]) -> None:
        self.model, self.task, self.name = model, task, f"{task.kind} {task.setting}"
        self.gradients, self.log = (folder / f"{model} {self.name}.{ending}" for ending in ("pt", "log"))
        self.point: Point | None = None
        self.times_ns: list[list[int]] = []
        files = {"gradients": str(self.gradients), "lock": str(folder / "device.lock")}
        text = json.dumps({"name": model, "task": asdict(task), **files, **fields})
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2", **os.environ}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    @property
    def words(self) -> str:
        """The last that the process said on its standard error."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:].strip()

    @property
    def is_ready(self) -> bool:
        """True if the point can be timed: it is compiled, and its process answers."""
        return self.point is not None and self.point.failure is None and bool(self.point.peak_bytes)

    def ask(self, what: str) -> None:
        """Begin a measurement, unless the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says that the process has ended

    def fail(self, why: str) -> None:
        """Store a failure in the point, beside what was measured before."""
        base = self.point or Point(self.task.kind, self.task.setting)
        self.point = replace(base, failure=why)

    def ended(self) -> str:
        """How the process ended, and the last line that it said."""
        status = self.process.wait()
        killed = f" by {signal.Signals(-status).name}" if status < 0 else ""
        killed += ", as by a system that is out of memory" * (status == -signal.SIGKILL)
        last = self.words.splitlines()[-1:]
        return f"ended with status {status}{killed}" + "".join(f"; last line: {line[:300]}" for line in last)


class Pool:
    """The contests of several models.

    Args:
        fields: Arguments of `Contest` other than its model and its file of gradients.
        folder: For the processes' gradients and logs.
        workers: Processes that compile at once.
        keep: Is called with a model and its points whenever one of them changed.
        keep_launches: Is called with a model, a point's name and what `launches.profiled` found of it.
        tasks: Hands out the tasks that are left of a model, from its points so far.
        command: The module that a process runs; it is `contest_process`, or takes its place.
    """

    def __init__(
        self,
        models: Sequence[str],
        fields: Mapping[str, Any],
        folder: Path,
        workers: int,
        keep: Callable[[str, Sequence[Point]], None],
        keep_launches: Callable[[str, str, Sequence[Any]], None],
        *,
        tasks: Callable[[str, Sequence[Point]], Iterable[Task]] = lambda model, points: tasks(points),
        command: Sequence[str] = (),
    ) -> None:
        self.models, self.fields, self.folder, self.workers = models, fields, folder, workers
        self.keep, self.keep_launches, self.tasks, self.command = keep, keep_launches, tasks, command
        self.members: list[Member] = []
        self._longest_s: dict[str, float] = {}
        self._lines: queue.Queue[tuple[Member, str]] = queue.Queue()

    def points(self, model: str) -> list[Point]:
        """Points of a model measured so far, plain first."""
        return [each.point for each in self.members if each.model == model and each.point is not None]

    def run(self, minutes: float) -> str:
        """Compile, then time; says what was left out."""
        start = time.monotonic()
        with self.ended():
            left_out = self.compile(start + 60 * SHARE_OF_TIME * minutes)
            self.compare()
            rounds = sum(self.time(start + 60 * minutes) for _ in range(ROUNDS))
            self.profile(start + 60 * minutes)
        text = f"timed in {rounds} rounds, each point alone"
        return f"{text}; not compiled in time: {', '.join(left_out)}" if left_out else text

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End all processes behind the body."""
        try:
            yield
        finally:
            for member in self.members:
                member.process.kill()
                member.process.wait()

    # -- compiling --

    def compile(self, deadline: float) -> list[str]:
        """Compile until no task is left; returns the names of the points that are not compiled at the deadline."""
        start = time.monotonic()
        while True:
            running = [member for member in self.members if member.point is None]
            waiting = self._waiting()
            for model, task in waiting[: self.workers - len(running)]:
                running.append(self._begin(model, task))
            if not running:
                return []
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                for member in running:
                    member.process.kill()
                return [f"{m.model} {m.name}" for m in running] + [f"{m} {t.kind} {t.setting}" for m, t in waiting]
            try:
                self._take(*self._lines.get(timeout=min(left_s, TOLD_EVERY_S)))
            except queue.Empty:
                names = ", ".join(f"{member.model} {member.name}" for member in running)
                harness.progress(f"after {time.monotonic() - start:.0f} s these still compile: {names}")

    def _waiting(self) -> list[tuple[str, Task]]:
        """Tasks that can start now, as pairs (model, task), taking the models in turn."""
        found: list[list[tuple[str, Task]]] = []
        for model in self.models:
            begun = {(m.task.kind, m.task.setting) for m in self.members if m.model == model}
            new = [t for t in self.tasks(model, self.points(model)) if (t.kind, t.setting) not in begun]
            found.append([(model, task) for task in new])
        return [each[k] for k in range(max(map(len, found), default=0)) for each in found if k < len(each)]

    def _begin(self, model: str, task: Task) -> Member:
        member = Member(model, task, self.folder, self.command or COMMAND, self.fields)
        self.members.append(member)
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()
        return member

    def _listen(self, member: Member) -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            if line[0] in "{[":
                self._lines.put((member, line))
        self._lines.put((member, ""))  # it has ended

    def _take(self, member: Member, line: str) -> None:
        if member.point is not None:
            return  # an ended process that has told all it had to tell
        if line:
            member.point = Point(**json.loads(line))
        else:
            member.fail(member.ended())
        points = self.points(member.model)
        assert member.point is not None
        harness.progress(f"{member.model}: {'  '.join(cells(member.point, points, is_timed=False))}")
        self.keep(member.model, points)

    # -- what was compiled --

    def compare(self) -> None:
        """Each point's gradients with those of plain, and with those of float64 where they were computed."""
        for model in self.models:
            mine = [m for m in self.members if m.model == model and m.gradients.exists() and m.point is not None]
            found = {m.name: torch.load(m.gradients, weights_only=True) for m in mine}
            plain = next((found[m.name] for m in mine if m.task.kind == "plain"), None)
            exact = next((found[m.name] for m in mine if m.task.kind == EXACT), None)
            for member in mine:
                assert member.point is not None
                if plain is not None:
                    total, worst = differences(found[member.name], plain)
                    member.point = replace(member.point, gradient_difference=total, worst_gradient=worst)
                if exact is not None:
                    total, _ = differences(found[member.name], exact)
                    member.point = replace(member.point, exact_difference=total)
            self.keep(model, self.points(model))

    def time(self, deadline: float, visits: int = 1) -> bool:
        """Time the points of each model in turn, and as often as `visits` says begin anew: A B A B.

        Returns:
            False if time ran out; no visit is begun that would by the longest before it end behind the deadline.
        """
        for model in self.models:
            for member in visits * self._in_order(model):
                if not self._fits("time", deadline):
                    return False
                found = self._asked(member, "time", deadline)
                if len(found) > 1 and member.point is not None:
                    member.times_ns.append(found)
                    point = with_times(member.point, [time_ns for visit in member.times_ns for time_ns in visit])
                    middles = [sorted(visit)[len(visit) // 2] for visit in member.times_ns]
                    member.point = replace(point, visits_ns=middles)
                self.keep(model, self.points(model))
        return True

    def profile(self, deadline: float) -> bool:
        """Hand on the launches of each point; False if time ran out, as in `time`."""
        for model in self.models:
            for member in self._in_order(model):
                if not self._fits("kernels", deadline):
                    return False
                found = self._asked(member, "kernels", deadline)
                if found:
                    self.keep_launches(model, member.name, found)
                else:
                    self.keep(model, self.points(model))
        return True

    def _in_order(self, model: str) -> list[Member]:
        """Points that can be timed: plain, each rival followed by ours at its peak, and the others."""
        ready = {member.name: member for member in self.members if member.model == model and member.is_ready}
        beside = {name: f"remat at {name}" for name in ready if f"remat at {name}" in ready}
        names = [pair for name in ready if name not in beside.values() for pair in (name, beside.get(name)) if pair]
        return [ready[name] for name in names]

    def _fits(self, what: str, deadline: float) -> bool:
        return time.monotonic() + self._longest_s.get(what, ASKED_S[what]) <= deadline

    def _asked(self, member: Member, what: str, deadline: float) -> list[Any]:
        """The answer of a process; an empty list, and a failure in its point, if it ends or fails or does not answer."""
        if not member.is_ready:
            return []
        start = time.monotonic()
        member.ask(what)
        found: Any = self._answer(member, min(ANSWER_S, max(0.0, deadline - start) + LATE_S))
        if isinstance(found, list):
            self._longest_s[what] = max(self._longest_s.get(what, 0.0), time.monotonic() - start)
            return found
        member.fail(f"asked for {what}: {found}")
        harness.progress(f"{member.model} {member.name}: {what}: {found}")
        return []

    def _answer(self, member: Member, limit_s: float) -> list[Any] | str:
        """A list, or why there is none."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                other, line = self._lines.get(timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if member.process.poll() is not None and self._lines.empty():
                    return member.ended()
                if time.monotonic() >= deadline:
                    member.process.kill()
                    return f"no answer for {limit_s:.0f} s"
                continue
            if other is member:
                found = json.loads(line) if line else member.ended()
                return found if isinstance(found, list | str) else str(found["failure"])
