"""The points of a session, its parts and the seconds that they are expected to take.

Seconds of an H200 with 16 cores are from the run whose points are in benchmarks/results/gpu_h200, where 15 processes compiled 36
points; those of toys are of two cores of an AMD EPYC that have nothing else to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.contest.frontier import Point
from benchmarks.contest.runs import EXACT, Task, matches
from benchmarks.gpu_quick.clock import Part
from benchmarks.gpu_quick.verdicts import AT_CHECKPOINT, RIVALS, WITH_OFFLOAD

MODELS = ("gpt", "llama", "resnet50")
IN_FLOAT64 = ("resnet50",)
"""Models whose gradients are compared with float64's: what convolutions round is not settled."""

OFFLOADED = ("gpt", "llama")
"""Models that take a point more: at the peak of checkpointed blocks with saved tensors on the host."""

POINTS = 6
VISITS = 2
"""Visits of each point in a part that times: A B A B."""

COMPILE_S = {"gpt": 40.0, "llama": 45.0, "resnet50": 75.0}
"""Of one point, while 14 others compile, its tuned kernels and four steps included."""
OTHER_COMPILE_S = 60.0
VISIT_S, LAUNCHES_S = 1.3, 3.0
CALIBRATE_S, CALIBRATED_S = 50.0, 30.0
"""Of `compile-remat calibrate` in all, and of its `--seconds`."""
CONVOLUTIONS_S = 50.0
TOY_COMPILE_S, TOY_VISIT_S, TOY_LAUNCHES_S = 10.0, 0.4, 0.8
TOY_CALIBRATE_S, TOY_CALIBRATED_S = 15.0, 1.0
TOY_CONVOLUTIONS_S = 25.0
EMIT_S, TOY_EMIT_S = 150.0, 14.0
"""Of a point whose code is emitted and not run."""
END_S = 10.0
"""Of the picture and the last files."""


def tasks(model: str, points: Sequence[Point], *, in_float64: bool = True) -> Iterator[Task]:
    """Plain, the rivals, `min`, and ours at each rival's peak once that is measured, also with offload at that of checkpointed
    blocks; perhaps the gradients in float64.
    """
    yield Task("plain", "default")
    for kind, setting in RIVALS:
        yield Task(kind, setting)
    for task in matches(points):
        yield task
        if model in OFFLOADED and task.setting == AT_CHECKPOINT:
            yield replace(task, setting=WITH_OFFLOAD, offload="auto")
    yield Task("remat", "min", "min")
    if in_float64 and model in IN_FLOAT64:
        yield Task(EXACT, "float64")


def parts(models: Sequence[str], workers: int, *, is_toy: bool, runs: bool = True) -> list[Part]:
    """The parts of a session, in their order.

    Args:
        runs: False if the device runs nothing.
    """
    numbers = [POINTS + (model in OFFLOADED) for model in models]
    points = sum(numbers)
    each = [point_s(model, is_toy=is_toy, runs=runs) for model in models]
    in_turn_s = sum(number * seconds for number, seconds in zip(numbers, each, strict=True)) / workers
    compiling = Part("compile", max(2.2 * max(each), in_turn_s), is_kept=True)
    if not runs:
        return [compiling]
    visits_s = points * VISITS * (TOY_VISIT_S if is_toy else VISIT_S)
    return [
        Part("calibrate", TOY_CALIBRATE_S if is_toy else CALIBRATE_S),
        compiling,  # of a rival and then of ours at its peak, or of all points where workers are few
        Part("time", visits_s, is_kept=True),
        Part("launches", points * (TOY_LAUNCHES_S if is_toy else LAUNCHES_S), is_kept=True),
        Part("time again", visits_s),
        Part("convolutions", TOY_CONVOLUTIONS_S if is_toy else CONVOLUTIONS_S),
        Part("picture", END_S, is_kept=True),
    ]


def point_s(model: str, *, is_toy: bool, runs: bool = True) -> float:
    """Seconds that a process takes to compile a point, beside others on cores of their own."""
    if not runs:
        return TOY_EMIT_S if is_toy else EMIT_S
    return TOY_COMPILE_S if is_toy else COMPILE_S.get(model, OTHER_COMPILE_S)
