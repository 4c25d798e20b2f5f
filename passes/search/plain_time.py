"""How long a step takes under plain torch.compile's own plan: what extra times are measured from."""

from __future__ import annotations

from compile_remat.passes.problem.problem import Problem


def plain_time_ns(problem: Problem) -> int | None:
    """Return the estimated time of a step that saves the problem's `reference`.

    None where the problem does not know what torch saves.
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
