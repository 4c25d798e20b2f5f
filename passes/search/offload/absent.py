"""The problem in which saved buffers wait on the host: its plans have the memory that these buffers leave in the backward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compile_remat.passes.memory.step_curve import StepCurve
from compile_remat.passes.problem.problem import SAVE, Problem
from compile_remat.passes.search.offload.transfers import Transfers


def without_moved(problem: Problem, curve: StepCurve, made: Transfers) -> Problem:
    """The problem whose plans save the moved values, and in which their buffers take no memory until they are fetched.

    Plans of it are not plans with copies: their peak is too low in the forward, where the buffers leave one by one.
    """
    index = {step.name: b for b, step in enumerate(problem.steps)}
    steps_at = np.array([index.get(name, -1) for name in curve.slots], dtype=np.int64)
    before = np.maximum.accumulate(np.concatenate([[-1], steps_at]))  # the last step before each slot
    absent = [0] * len(problem.steps)
    for buffer, fetch in zip(made.moved, made.fetches, strict=True):
        if before[fetch] >= 0:
            absent[before[fetch]] += buffer.nbytes
    moved = {buffer.value for buffer in made.moved}
    values = tuple(replace(each, pin=SAVE) if v in moved else each for v, each in enumerate(problem.values))
    steps = tuple(
        replace(step, held_bytes=step.held_bytes - nbytes) for step, nbytes in zip(problem.steps, absent, strict=True)
    )
    return replace(problem, values=values, steps=steps)
