"""Batch scaling: a planning problem at every batch size, from traces at two batch sizes.

The batch either is a factor of a tensor's size or is not, so bytes are exactly affine in the batch.  A time is the maximum of two
affine sums (`roofline`), so times at other batches are approximations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from compile_remat.passes import Problem, Step, Value, plain_time_ns

BYTES = ("nbytes", "transient_bytes", "workspace_bytes", "held_bytes")
Node = TypeVar("Node", Value, Step)

TIMES = ("time_ns", "save_time_ns")


@dataclass(frozen=True)
class TracedStep:
    """A traced step as a planning problem, and the bytes of the model's inputs.

    Attributes:
        reference: Indices of the values that torch's own default partition saves; empty if it was not computed.
    """

    problem: Problem
    input_bytes: int
    reference: tuple[int, ...] = ()

    @property
    def with_torch(self) -> Problem:
        """The problem with torch's saved set as `Problem.reference`, so that torch's own plan is a candidate."""
        return replace(self.problem, reference=self.reference)


@dataclass(frozen=True)
class BatchScaling:
    """One model's traced step at two batches, scaled to any other.

    Attributes:
        batches: The two batch sizes, ascending.
        steps: The step at each batch size; equal but for sizes and prices.
    """

    batches: tuple[int, int]
    steps: tuple[TracedStep, TracedStep]

    @property
    def is_one_graph(self) -> bool:
        """True if both batches gave the same graph, which the methods below require."""
        return are_alike(self.steps[0].problem, self.steps[1].problem)

    def at(self, batch: int) -> Problem:
        """Returns the planning problem at `batch`."""
        first, second = (step.problem for step in self.steps)
        values = [self._between(a, b, batch) for a, b in zip(first.values, second.values, strict=True)]
        steps = [self._between(a, b, batch) for a, b in zip(first.steps, second.steps, strict=True)]
        time_ns = self._line(first.step_time_ns, second.step_time_ns, batch)
        return replace(first, values=tuple(values), steps=tuple(steps), step_time_ns=time_ns)

    def plain_time_ns_at(self, batch: int) -> int | None:
        """Estimated step time at `batch` with the values that plain torch.compile saves at the first batch; None if unknown."""
        return plain_time_ns(replace(self.at(batch), reference=self.steps[0].reference))

    def input_bytes_at(self, batch: int) -> int:
        """Bytes of the model's inputs at `batch`."""
        return self._line(self.steps[0].input_bytes, self.steps[1].input_bytes, batch)

    def _between(self, first: Node, second: Node, batch: int) -> Node:
        """Returns a node at `batch`.  `dataclasses.replace` would take most of the time here, since it reads every field."""
        old, other = vars(first), vars(second)
        changed = {n: self._line(old[n], other[n], batch) for n in (*BYTES, *TIMES) if n in old and old[n] != other[n]}
        if not changed:
            return first
        made = object.__new__(type(first))
        vars(made).update(old, **changed)
        return made

    def _line(self, first: int, second: int, batch: int) -> int:
        low, high = self.batches
        return max(0, first + (second - first) * (batch - low) // (high - low))


def are_alike(first: Problem, second: Problem) -> bool:
    """Returns whether two problems are the same graph at two sizes."""
    return _shape_of(first) == _shape_of(second)


def _shape_of(problem: Problem) -> list[tuple[object, ...]]:
    values = [(v.name, v.kernel, v.reads, v.pin, v.realised, v.in_forward, v.is_output) for v in problem.values]
    steps = [(s.name, s.kernel, s.reads, s.gradients, s.realised, s.is_output) for s in problem.steps]
    return [*values, *steps]
