"""Planning problems of any size, made without a model: rows of transformer layers as the planner sees them.

A layer is normalised attention and a gated MLP, 15 values and 20 steps: matmuls and attention are kernels of their own, the
normalisations' statistics are reductions, and the rest is pointwise and fuses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from compile_remat.passes import Problem, Step, Value
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, REDUCTION

FLOPS_PER_NS, BYTES_PER_NS, LAUNCH_NS = 300_000, 3_000, 2_000
"""Rates and launch time of about an H100 in bf16."""

VALUES_PER_LAYER = 15

MOST_READS = 4
"""A pointwise value that gathers more reads than this through others is realised, as Inductor does it."""


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer in elements: tokens of a batch, a token's vector between layers, in attention and in the MLP."""

    tokens: int = 8192
    width: int = 4096
    attention: int = 4096
    inner: int = 11008


def equal_layers(count: int) -> Problem:
    """A row of `count` equal layers."""
    return row_of([Layer()] * count)


def unequal_layers(count: int, seed: int = 0) -> Problem:
    """A row of `count` layers whose sizes are drawn at random."""
    drawn = random.Random(seed)
    return row_of([Layer(attention=drawn.randint(2048, 8192), inner=drawn.randint(4096, 16384)) for _ in range(count)])


def row_of(layers: Sequence[Layer]) -> Problem:
    """The layers one behind the other; the backward begins with the gradient of what the last one returns."""
    draft = _Draft()
    x = draft.value("embedding", EXTERN, 2 * layers[0].tokens * layers[0].width, ())
    runs = []
    for k, layer in enumerate(layers):
        run = _Run(draft, f"l{k}", layer, x)
        runs.append(run)
        x = run.out
    gradient = draft.step("loss", POINTWISE, draft.values[x].nbytes, (x,), ())
    for run in reversed(runs):
        gradient = run.backward(gradient)
    returned = tuple(b for b, s in enumerate(draft.steps) if s.is_output)
    draft.steps.append(Step("output", 0, CONSTANT, (), returned))
    total_ns = sum(v.time_ns for v in draft.values) + sum(s.time_ns for s in draft.steps)
    return Problem(tuple(draft.values), tuple(draft.steps), total_ns)


@dataclass
class _Draft:
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gathered: list[frozenset[int]] = field(default_factory=list)

    def value(self, name: str, kernel: str, nbytes: int, reads: Sequence[int], flops: int = 0) -> int:
        save_ns = 2 * nbytes // BYTES_PER_NS if kernel == POINTWISE else 0
        place, found = len(self.values), frozenset[int]().union(*(self.gathered[v] for v in reads))
        is_realised = kernel == POINTWISE and len(found) > MOST_READS
        self.gathered.append(found if kernel == POINTWISE and not is_realised else frozenset({place}))
        time_ns, read = _time_ns(kernel, nbytes, flops), tuple(sorted(reads))
        self.values.append(Value(name, nbytes, kernel, read, time_ns, save_ns, realised=is_realised, position=place))
        return place

    def step(
        self,
        name: str,
        kernel: str,
        nbytes: int,
        reads: Sequence[int],
        gradients: Sequence[int],
        flops: int = 0,
        *,
        is_output: bool = False,
    ) -> int:
        time_ns = _time_ns(kernel, nbytes, flops)
        made = Step(name, nbytes, kernel, tuple(sorted(reads)), tuple(sorted(gradients)), time_ns, is_output=is_output)
        self.steps.append(made)
        return len(self.steps) - 1


def _time_ns(kernel: str, nbytes: int, flops: int) -> int:
    if kernel == ITEM:
        return 0
    launch_ns = 0 if kernel == POINTWISE else LAUNCH_NS
    return launch_ns + max(flops // FLOPS_PER_NS, nbytes // BYTES_PER_NS)


class _Run:
    """The forward of one layer, and the numbers of its values that its backward reads."""

    def __init__(self, draft: _Draft, name: str, layer: Layer, x: int) -> None:
        self.draft, self.name, self.layer, self.x = draft, name, layer, x
        width, wide, inner = layer.width, layer.attention, layer.inner
        self.stat = self._value("stat", REDUCTION, 4 * layer.tokens, x)
        self.norm = self._value("norm", POINTWISE, self._nbytes(width), x, self.stat)
        self.qkv = self._matmul("qkv", width, 3 * wide, self.norm)
        attention = self._value("attention", EXTERN, 0, self.qkv, flops=2 * layer.tokens * 1024 * wide)
        self.mixed = self._value("mixed", ITEM, self._nbytes(wide), attention)
        self.logsumexp = self._value("logsumexp", ITEM, 128 * layer.tokens, attention)
        back = self._matmul("back", wide, width, self.mixed)
        self.middle = self._value("middle", POINTWISE, self._nbytes(width), x, back)
        self.stat2 = self._value("stat2", REDUCTION, 4 * layer.tokens, self.middle)
        self.norm2 = self._value("norm2", POINTWISE, self._nbytes(width), self.middle, self.stat2)
        self.gate = self._matmul("gate", width, inner, self.norm2)
        self.up = self._matmul("up", width, inner, self.norm2)
        self.gated = self._value("gated", POINTWISE, self._nbytes(inner), self.gate, self.up)
        down = self._matmul("down", inner, width, self.gated)
        self.out = self._value("out", POINTWISE, self._nbytes(width), self.middle, down)

    def backward(self, gradient: int) -> int:
        """Adds the layer's steps; returns the gradient of the layer's input."""
        width, wide, inner = self.layer.width, self.layer.attention, self.layer.inner
        inside = self._gradient("down", width, inner, self.gated, gradient)
        sides = (self.gate, self.up)
        of_gate = self._step("gate_act", POINTWISE, self._nbytes(inner), sides, (inside,))
        of_up = self._step("up_act", POINTWISE, self._nbytes(inner), sides, (inside,))
        by_gate = self._gradient("gate", inner, width, self.norm2, of_gate)
        by_up = self._gradient("up", inner, width, self.norm2, of_up)
        both = self._step("both", POINTWISE, self._nbytes(width), (), (by_gate, by_up))
        gradient = self._normalised("norm2", self.middle, self.stat2, both, gradient)
        mixed = self._gradient("back", width, wide, self.mixed, gradient)
        read = (self.qkv, self.mixed, self.logsumexp)
        flops = 5 * self.layer.tokens * 1024 * wide
        of_qkv = self._step("attention", EXTERN, self._nbytes(3 * wide), read, (mixed,), flops)
        of_norm = self._gradient("qkv", 3 * wide, width, self.norm, of_qkv)
        return self._normalised("norm", self.x, self.stat, of_norm, gradient)

    def _nbytes(self, width: int) -> int:
        return 2 * self.layer.tokens * width

    def _value(self, name: str, kernel: str, nbytes: int, *reads: int, flops: int = 0) -> int:
        return self.draft.value(f"{self.name}_{name}", kernel, nbytes, reads, flops)

    def _step(
        self, name: str, kernel: str, nbytes: int, reads: Sequence[int], gradients: Sequence[int], flops: int = 0
    ) -> int:
        return self.draft.step(f"{self.name}_d_{name}", kernel, nbytes, reads, gradients, flops)

    def _matmul(self, name: str, inner: int, columns: int, x: int) -> int:
        flops = 2 * self.layer.tokens * inner * columns
        return self._value(name, EXTERN, self._nbytes(columns), x, flops=flops)

    def _gradient(self, name: str, inner: int, columns: int, x: int, gradient: int) -> int:
        """A matmul's two gradients: of its weight, which is a graph output, and of its input, [tokens, columns]."""
        flops = 2 * self.layer.tokens * inner * columns
        label = f"{self.name}_d_{name}_weight"
        self.draft.step(label, EXTERN, 2 * inner * columns, (x,), (gradient,), flops, is_output=True)
        return self._step(name, EXTERN, self._nbytes(columns), (), (gradient,), flops)

    def _normalised(self, name: str, x: int, stat: int, gradient: int, beside: int) -> int:
        """Gradient of the normalised tensor, plus the gradient of the residual path."""
        small = self._step(f"{name}_stat", REDUCTION, 4 * self.layer.tokens, (x, stat), (gradient,))
        return self._step(name, POINTWISE, self._nbytes(self.layer.width), (x, stat), tuple({gradient, beside, small}))
