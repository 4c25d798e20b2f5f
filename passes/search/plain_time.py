"""How long a step takes under plain torch.compile's own plan: what extra times are measured from."""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import Problem
from compile_remat.passes.problem.tags import LIKE_TORCH, obeying


def plain_time_ns(problem: Problem) -> int | None:
    """Return the estimated time of a step that saves the problem's `reference`, with those tags that torch obeys.

    None where the problem does not know what torch saves.
    """
    if not problem.reference:
        return None
    saved = np.zeros((len(problem.values), 1), dtype=bool)
    saved[list(problem.reference)] = True
    return problem.step_time_ns + int(Simulator(obeying(problem, LIKE_TORCH)).times_ns(saved)[0])
