"""Rejects a malformed problem before planning: problems are also read from files and made by other programs."""

from __future__ import annotations

from compile_remat.passes.problem.problem import Problem


def check(problem: Problem) -> None:
    """Returns None if the problem is well formed.

    Raises:
        ValueError: The problem has no backward, a node reads itself, a later or a missing node, or a figure is negative.
    """
    if not problem.steps:
        raise ValueError("the problem has no backward step: there is nothing to plan for")
    num_values = len(problem.values)
    for v, value in enumerate(problem.values):
        _check_reads(value.name, value.reads, v)
        _check_figures(value.name, value.nbytes, value.time_ns, value.save_time_ns)
    for b, step in enumerate(problem.steps):
        _check_reads(step.name, step.reads, num_values)
        _check_reads(step.name, step.gradients, b)
        _check_figures(step.name, step.nbytes, step.time_ns)


def _check_reads(name: str, reads: tuple[int, ...], end: int) -> None:
    wrong = [r for r in reads if not 0 <= r < end]
    if wrong:
        raise ValueError(
            f"{name} reads node {wrong[0]}, which is not computed before it: nodes stand behind what they read, without cycles"
        )


def _check_figures(name: str, *figures: int) -> None:
    if min(figures) < 0:
        raise ValueError(f"{name} has a negative size or time")
