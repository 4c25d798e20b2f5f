"""How a planning problem grows with the batch: two traces give it at every batch.

The batch is one factor of a tensor's size or none, so bytes are a constant plus a multiple of the batch, exactly.  A time is the
longer of two such sums (`roofline`), so between and beyond the two batches it is an approximation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from compile_remat.passes import Problem, Value
from compile_remat.passes import Step as BackwardStep

BYTES = ("nbytes", "transient_bytes", "workspace_bytes", "held_bytes")
Node = TypeVar("Node", Value, BackwardStep)

TIMES = ("time_ns", "save_time_ns")


@dataclass(frozen=True)
class Step:
    """A traced step as a planning problem, and the bytes of the model's inputs."""

    problem: Problem
    input_bytes: int


@dataclass(frozen=True)
class Growth:
    """One model's step at two batches.

    Attributes:
        batches: The two, the first one below the second.
        steps: The step at each; alike but for sizes and prices.
    """

    batches: tuple[int, int]
    steps: tuple[Step, Step]

    @property
    def is_one_graph(self) -> bool:
        """Whether the two are the same graph; else nothing below holds."""
        return are_alike(self.steps[0].problem, self.steps[1].problem)

    def at(self, batch: int) -> Problem:
        """The step at any batch."""
        first, second = (step.problem for step in self.steps)
        values = [self._between(a, b, batch) for a, b in zip(first.values, second.values, strict=True)]
        steps = [self._between(a, b, batch) for a, b in zip(first.steps, second.steps, strict=True)]
        time_ns = self._line(first.step_time_ns, second.step_time_ns, batch)
        return replace(first, values=tuple(values), steps=tuple(steps), step_time_ns=time_ns)

    def input_bytes_at(self, batch: int) -> int:
        """Bytes of the inputs."""
        return self._line(self.steps[0].input_bytes, self.steps[1].input_bytes, batch)

    def _between(self, first: Node, second: Node, batch: int) -> Node:
        names = [name for name in (*BYTES, *TIMES) if hasattr(first, name)]
        found: dict[str, Any] = {name: self._line(getattr(first, name), getattr(second, name), batch) for name in names}
        return replace(first, **found)

    def _line(self, first: int, second: int, batch: int) -> int:
        low, high = self.batches
        return max(0, first + (second - first) * (batch - low) // (high - low))


def are_alike(first: Problem, second: Problem) -> bool:
    """Whether two problems are the same graph at two sizes."""
    return _shape_of(first) == _shape_of(second)


def _shape_of(problem: Problem) -> list[tuple[object, ...]]:
    values = [(v.name, v.kernel, v.reads, v.pin, v.realised, v.in_forward, v.is_output) for v in problem.values]
    steps = [(s.name, s.kernel, s.reads, s.gradients, s.realised, s.is_output) for s in problem.steps]
    return [*values, *steps]
