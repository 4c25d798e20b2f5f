"""Estimated time of a step under plain torch.compile's own plan: the base of extra times."""

from __future__ import annotations

from compile_remat.passes.problem.problem import Problem


def plain_time_ns(problem: Problem) -> int | None:
    """Returns the estimated time of a step that saves the problem's `reference`.

    The result is None if `reference` is empty: the values that torch saves are unknown.
    """
    if not problem.reference:
        return None
    saved, seen = frozenset(problem.reference), set[int]()
    stack = [v for step in problem.steps for v in step.reads]
    extra_ns = 0
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            value = problem.values[v]
            extra_ns += value.save_time_ns if v in saved else value.time_ns
            stack += () if v in saved else value.reads
    return problem.step_time_ns + extra_ns
