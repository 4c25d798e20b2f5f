"""Measuring one point of a frontier: a fresh state, one way to train one model, its peak, its time and its gradients."""

import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import harness
from benchmarks.common.timing import device_times_ns
from benchmarks.common.torch_budget import torch_activation_budget
from benchmarks.contest.frontier import Point, find
from benchmarks.models import Case
from benchmarks.models.large import build_large, checkpointed

FRACTIONS = (0.5, 0.3)
TORCH_BUDGETS = (0.5, 0.3, 0.1, 0.7, 0.9, 0.0)
SAMPLES = 2048
"""Elements of each gradient that are compared."""
NEAR = 0.99
"""A rival's peak is not matched where we have a budget between this part of it and all of it already."""

LEAST_STEPS, MOST_STEPS, TIMED_S = 5, 30, 4.0
EXACT = "exact"
"""The kind of the point whose gradients are those of float64, in eager mode; it has no other figures."""


@dataclass(frozen=True)
class Task:
    """A point still to be measured.

    Attributes:
        offload: The option of our backend.
    """

    kind: str
    setting: str
    memory_budget: int | str | None = None
    offload: str = "off"

    @property
    def options(self) -> dict[str, str]:
        """Options of our backend for this point alone."""
        return {} if self.offload == "off" else {"offload": self.offload}


def tasks(points: Sequence[Point]) -> Iterator[Task]:
    """Tasks left to measure, the most informative first; a task at a rival's peak appears once that peak is measured."""
    done = {(point.kind, point.setting) for point in points}
    return (task for task in _all_tasks(points) if (task.kind, task.setting) not in done)


def _all_tasks(points: Sequence[Point]) -> Iterator[Task]:
    yield Task("plain", "default")
    plain = find(points, "plain", "default")
    if plain is not None and plain.peak_bytes is not None:
        for fraction in FRACTIONS:
            yield Task("remat", f"{fraction:g}", int(fraction * plain.peak_bytes))
    yield Task("checkpoint", "blocks")
    yield Task("eager", "-")
    yield Task("remat", "max", "max")
    for value in TORCH_BUDGETS:
        yield Task("torch", f"{value:g}")
    yield from matches(points)
    yield Task("remat", "min", "min")


def matches(points: Sequence[Point]) -> Iterator[Task]:
    """Tasks of ours at each rival's measured peak, one task for nearly equal peaks; `max` stands for plain's own peak."""
    plain = find(points, "plain", "default")
    taken = [p.budget_bytes for p in points if p.kind == "remat" and p.budget_bytes and not p.setting.startswith("at ")]
    for rival in points:
        if rival.kind not in ("checkpoint", "torch") or not rival.peak_bytes:
            continue
        if plain is not None and plain.peak_bytes and rival.peak_bytes >= NEAR * plain.peak_bytes:
            continue
        if not any(NEAR * rival.peak_bytes <= nbytes <= rival.peak_bytes for nbytes in taken):
            taken.append(rival.peak_bytes)
            yield Task("remat", f"at {rival.name}", rival.peak_bytes)


class Contest:
    """One model on one device.

    Args:
        options: Options of our backend beside the budget; with ``compiler=eager`` the others compile nothing, too.
        gradients: The file that keeps samples of plain's gradients from one call to the next.
        share: Part of the batch that the model is trained with.
        is_apart: Every point is measured in a process of its own and has a file of gradients of its own.
        draws: Inputs whose gradients are compared, each drawn anew, if they are numbers and not tokens.
    """

    def __init__(
        self,
        name: str,
        device: str,
        scale: float,
        seed: int,
        options: Mapping[str, str],
        gradients: Path,
        share: float = 1.0,
        *,
        is_apart: bool = False,
        draws: int = 1,
    ) -> None:
        self.name, self.device, self.scale, self.seed, self.share = name, device, scale, seed, share
        self.options, self.gradients, self.is_apart, self.draws = options, gradients, is_apart, draws

    def take(self, task: Task) -> Point:
        """Measure one point; an error becomes part of the point."""
        start = time.perf_counter()
        with fresh_state(self.device):
            try:
                run, point = self.prepared(task)
                point = with_times(point, self._times(run))
            except Exception as error:  # one point must not lose the others
                point = replace(started(task), **failure_of(error))
        return replace(point, wall_s=round(time.perf_counter() - start, 1))

    def prepared(self, task: Task) -> tuple[harness.Training, Point]:
        """Compile one point and measure all of it but its time; what is handed back can take further steps."""
        point = started(task)
        case = build_large(self.name, device=self.device, scale=self.scale, seed=self.seed, share=self.share)
        if task.kind == EXACT:
            run = in_float64(case)
            self._compared(task, self._drawn(run, case))
            return run, point
        limit = torch_activation_budget(float(task.setting)) if task.kind == "torch" else nullcontext()
        with limit:
            run = self._training(task, case)
            start = time.perf_counter()
            run.clear_and_step()
            first_step_s = time.perf_counter() - start
            run.clear_and_step()  # if graphs share a budget, the second step may plan once more
            run.clear()
            level_bytes = torch.cuda.memory_allocated(self.device) if self.is_cuda else 0
            peak = harness.second_step_peak(run, self.device)
            reserved_bytes = torch.cuda.max_memory_reserved(self.device) - level_bytes if self.is_cuda else None
            difference, worst = self._compared(task, self._drawn(run, case))
        grads = [p.grad for p in run.module.parameters() if p.grad is not None]
        point = replace(
            point,
            level_bytes=level_bytes,
            peak_bytes=peak.peak_bytes,
            requested_bytes=peak.requested_bytes,
            reserved_bytes=reserved_bytes,
            gradient_bytes=sum(grad.nbytes for grad in grads),
            first_step_s=round(first_step_s, 2),
            gradient_difference=difference,
            worst_gradient=worst,
            **(reported() if task.kind == "remat" else {}),
        )
        run.clear()
        return run, point

    def _drawn(self, run: harness.Training, case: Case) -> list[Tensor]:
        """Samples of the gradients of each draw of the inputs, the first of which are the case's own."""
        found = []
        for draw in range(self.draws if any(value.is_floating_point() for value in case.inputs) else 1):
            torch.manual_seed(self.seed + 1 + draw)
            for own, used in zip(case.inputs, run.inputs, strict=True) if draw else ():
                if own.is_floating_point():
                    used.copy_(own.normal_())
            run.clear_and_step()
            found += samples([parameter.grad for parameter in run.module.parameters()])
        return found

    def _training(self, task: Task, case: Case) -> harness.Training:
        if task.kind == "eager":
            return harness.Training(case.module, case.module, case.inputs)
        if task.kind == "checkpoint":
            return self._plain(checkpointed(case))
        if task.kind == "remat":
            assert task.memory_budget is not None
            return harness.remat(case, task.memory_budget, **self.options, **task.options)
        return self._plain(case)

    def _plain(self, case: Case) -> harness.Training:
        """torch.compile without us; ``aot_eager`` partitions the graph as Inductor does, and runs the parts as they are."""
        return harness.training(case, backend="aot_eager" if self.options.get("compiler") == "eager" else "inductor")

    def _times(self, run: harness.Training) -> list[int]:
        """After two steps that nobody looks at, as many as a few seconds allow."""
        warm = device_times_ns(run.clear_and_step, 2, self.device)
        count = int(TIMED_S * 1e9 / max(1, warm[-1])) if self.scale == 1 else 0
        return device_times_ns(run.clear_and_step, min(MOST_STEPS, max(LEAST_STEPS, count)), self.device)

    def _compared(self, task: Task, found: list[Tensor]) -> tuple[float | None, float | None]:
        """Differences from plain's gradients, which the point "plain" stores; None if plain's gradients are missing.

        If `is_apart`, every point keeps its own gradients, and they are compared once all points have them.
        """
        if task.kind == "plain" or self.is_apart:
            self.gradients.parent.mkdir(parents=True, exist_ok=True)
            torch.save(found, self.gradients)
            return (None, None) if self.is_apart else (0.0, 0.0)
        if not self.gradients.exists():
            return None, None
        return differences(found, torch.load(self.gradients, weights_only=True))

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"


def in_float64(case: Case) -> harness.Training:
    """The same weights and inputs in float64, in eager mode; the case's module is changed in place."""
    module = case.module.double()
    return harness.Training(module, module, tuple(v.double() if v.is_floating_point() else v for v in case.inputs))


def started(task: Task) -> Point:
    """A point without figures."""
    budget_bytes = task.memory_budget if isinstance(task.memory_budget, int) else None
    return Point(task.kind, task.setting, budget_bytes, date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))


def with_times(point: Point, times_ns: Sequence[int]) -> Point:
    """The point with the median and the quartiles of the times of its steps."""
    low_ns, median_ns, high_ns = statistics.quantiles(times_ns, n=4)
    return replace(
        point, step_ns=int(median_ns), step_low_ns=int(low_ns), step_high_ns=int(high_ns), steps=len(times_ns)
    )


def samples(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Evenly spaced elements of each gradient, in float32 on the host: all gradients of a large model are too large to keep."""
    found = []
    for gradient in gradients:
        if gradient is None:
            found.append(torch.zeros(0))
            continue
        count = min(SAMPLES, gradient.numel())
        places = torch.arange(count, device=gradient.device) * gradient.numel() // max(1, count)
        found.append(gradient.detach().reshape(-1)[places].float().cpu())
    return found


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Norm of the difference over the norm of `expected`: of all gradients together, and the largest of any single one."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    total = torch.cat([a - b for a, b in pairs]).norm() / torch.cat([b for _, b in pairs]).norm()
    single = [float((a - b).norm() / b.norm()) for a, b in pairs if float(b.norm()) > 0]
    return float(total), max(single, default=0.0)


@contextmanager
def fresh_state(device: str) -> Iterator[None]:
    """Drops compiled code, reports and memory, before and after the body."""
    _free(device)
    try:
        yield
    finally:
        _free(device)


def _free(device: str) -> None:
    import compile_remat

    torch.compiler.reset()
    compile_remat.reset_reports()
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def is_alive(device: str) -> bool:
    """True if the device still computes: after some errors it fails for as long as this process lives."""
    try:
        return float(torch.ones(8, device=device).sum()) == 8.0
    except RuntimeError:
        return False


def reported() -> dict[str, Any]:
    """Figures of the latest report of the graph with the highest predicted peak."""
    import compile_remat

    found = {report.graph_key: report for report in compile_remat.reports()}
    report = max(found.values(), key=lambda each: each.predicted_peak_bytes or 0)
    plan = report.plan
    figures = {
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "scheduled_peak_bytes": report.scheduled_peak_bytes,
        "predicted_reserved_bytes": report.reserved_peak_bytes,
        "planning_s": round(report.planning_time_s, 2),
        "status": report.status,
        "message": report.message,
    }
    if plan is None:
        return figures
    return figures | {
        "predicted_step_ns": plan.once_time_ns + plan.extra_time_ns,
        "recompute_ns": plan.recompute_time_ns,
        "extra_ns": plan.extra_time_ns,
        "bound_ns": plan.bound_time_ns,
    }


def failure_of(error: Exception) -> dict[str, Any]:
    """A `BudgetError` is an answer, its floor; anything else is a failure, in the words of what Dynamo and Inductor wrapped."""
    from compile_remat.errors import BudgetError, find_error

    refused = find_error(error, BudgetError)
    if refused is not None:
        return {"floor_bytes": refused.floor_bytes}
    return {"failure": harness.reason_of(error)}
