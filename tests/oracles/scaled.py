"""Problems of bytes and nanoseconds, made as large as tensors and kernels are."""

from __future__ import annotations

from dataclasses import replace

from compile_remat.passes.problem.problem import Problem, Step, Value

BYTES, TIMES = 1 << 20, 100_000
"""A byte becomes a MiB, a nanosecond a tenth of a millisecond."""

OF_BYTES = ("nbytes", "transient_bytes", "workspace_bytes", "held_bytes", "observed_bytes", "observed_forward_bytes")
OF_TIME = ("time_ns", "save_time_ns")


def scaled(problem: Problem) -> Problem:
    """The problem with all bytes and times scaled."""

    def larger(node: Value | Step) -> dict[str, int]:
        bytes_ = {name: BYTES * getattr(node, name) for name in OF_BYTES if hasattr(node, name)}
        return bytes_ | {name: TIMES * getattr(node, name) for name in OF_TIME if hasattr(node, name)}

    values = tuple(replace(value, **larger(value)) for value in problem.values)  # type: ignore[arg-type]
    steps = tuple(replace(step, **larger(step)) for step in problem.steps)  # type: ignore[arg-type]
    return replace(problem, values=values, steps=steps, step_time_ns=TIMES * problem.step_time_ns)
