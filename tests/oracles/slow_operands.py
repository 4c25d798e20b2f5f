"""The operands of the backward's kernels, node by node."""

from __future__ import annotations

from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import POINTWISE


def slow_operands(simulator: Simulator) -> set[frozenset[int]]:
    """For each kernel of the backward, the values that it reads, or computes in registers if they are not saved."""
    values, steps = simulator.problem.values, simulator.problem.steps
    always, sometimes = simulator.lifetimes.always_stored, simulator.lifetimes.is_sometimes_stored

    def read_by_value(v: int) -> set[int]:
        """The value and, if it may be in registers, what its expression reads."""
        is_in_registers = values[v].kernel == POINTWISE and not always[v]
        return {v}.union(*(read_by_value(w) for w in values[v].reads)) if is_in_registers else {v}

    def read_by_step(b: int) -> set[int]:
        """The values that a step reads, also through the steps in registers before it."""
        inside = [
            g for g in steps[b].gradients if steps[g].kernel == POINTWISE and not simulator.lifetimes.step_stored[g]
        ]
        return set[int]().union(*map(read_by_value, steps[b].reads), *map(read_by_step, inside))

    found = {
        frozenset(read_by_step(b))
        for b, step in enumerate(steps)
        if step.kernel != POINTWISE or simulator.lifetimes.step_stored[b]
    }
    return found | {
        frozenset({v}.union(*map(read_by_value, value.reads)))
        for v, value in enumerate(values)
        if value.kernel != POINTWISE or always[v] or sometimes[v]
    }
