"""Problems to check the planner on: random ones, the same for the same seed, and a chain."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from compile_remat.passes.problem.facts import Assumptions
from compile_remat.passes.problem.problem import (
    CONSTANT,
    EXTERN,
    FREE,
    ITEM,
    POINTWISE,
    RECOMPUTE,
    REDUCTION,
    SAVE,
    Problem,
    Step,
    Value,
)


@dataclass(frozen=True)
class Shape:
    """Limits and features of the problems to draw."""

    max_values: int = 9
    max_late: int = 3
    max_steps: int = 7
    extern_only: bool = False
    with_memory_of_kernels: bool = False


def random_problem(rng: random.Random, shape: Shape = Shape()) -> Problem:
    """A problem that a joint graph could have given: every step is read or returned, what is late is read late."""
    values = _random_values(rng, shape)
    num_steps = rng.randint(1, shape.max_steps)
    values += _random_late(rng, shape, len(values), values, num_steps)
    steps = _random_steps(rng, shape, values, num_steps)
    places = _positions(values)
    values = [Value(**{**value.__dict__, "position": places[v]}) for v, value in enumerate(values)]
    if shape.with_memory_of_kernels:
        values, steps = _with_memory_of_kernels(rng, values, steps)
    return Problem(tuple(values), tuple(steps), step_time_ns=sum(v.time_ns for v in values) + len(steps))


def seeded_problem(seed: int, shape: Shape = Shape()) -> Problem:
    """The same problem for the same seed, on every machine."""
    return random_problem(random.Random(seed), shape)


problems = st.builds(random_problem, st.randoms(use_true_random=False), st.just(Shape(with_memory_of_kernels=True)))
"""Random problems that hypothesis can shrink."""


def _with_random_facts(problem: Problem, rng: random.Random) -> Problem:
    """The problem with some nodes' buffers and bytes observed."""
    values = [v.name for v in problem.values if v.in_forward]
    nodes = [v.name for v in problem.values] + [s.name for s in problem.steps[:-1]]

    def some(names: list[str], draw: Callable[[], Any]) -> tuple[tuple[str, Any], ...]:
        return tuple((name, draw()) for name in sorted(names) if rng.random() < 0.3)

    def is_stored() -> bool:
        return rng.random() < 0.5

    def nbytes() -> int:
        return rng.choice([1, 2, 5])

    return problem.with_facts(
        Assumptions(some(values, is_stored), some(nodes, is_stored), some(values, nbytes), some(nodes, nbytes))
    )


observed_problems = st.builds(_with_random_facts, problems, st.randoms(use_true_random=False))
"""Random problems with facts of plans that were observed."""


def chain(length: int, nbytes: int = 1, time_ns: int = 1) -> Problem:
    """Equal layers, each a kernel; the backward reads them from the last to the first and returns one gradient."""
    values = tuple(Value(f"v{k}", nbytes, EXTERN, (k - 1,) if k else (), time_ns, position=k) for k in range(length))
    steps = [Step(f"g{k}", nbytes, EXTERN, (length - 1 - k,), (k - 1,) if k else (), time_ns) for k in range(length)]
    steps.append(Step(f"g{length}", nbytes, EXTERN, (), (length - 1,), time_ns, is_output=True))
    steps.append(Step("output", 0, CONSTANT, (), (length,)))
    return Problem(values, tuple(steps), 2 * length * time_ns)


def _random_values(rng: random.Random, shape: Shape) -> list[Value]:
    values: list[Value] = []
    for _ in range(rng.randint(1, shape.max_values)):
        kernel = (
            EXTERN if shape.extern_only else rng.choice([POINTWISE] * 5 + [EXTERN] * 3 + [REDUCTION, CONSTANT, ITEM])
        )
        if kernel == ITEM:
            values += _random_tuple(rng, values)
        elif kernel == CONSTANT and rng.random() < 0.5:
            values.append(_random_snapshot(rng, len(values)))
        else:
            values.append(_random_value(rng, shape, len(values), kernel, _pick(rng, values)))
    return values


def _random_value(rng: random.Random, shape: Shape, index: int, kernel: str, reads: tuple[int, ...]) -> Value:
    plain = shape.extern_only
    return Value(
        name=f"v{index}",
        nbytes=rng.choice([1, 2, 2, 4, 4, 8]),
        kernel=kernel,
        reads=() if kernel == CONSTANT else reads,
        time_ns=rng.randint(0 if kernel == POINTWISE else 1, 6),
        save_time_ns=rng.choice([0, 0, 1, 2]) if kernel == POINTWISE else 0,
        pin=rng.choice([FREE] * 10 + [SAVE, RECOMPUTE]),
        is_output=not plain and rng.random() < 0.1,
        realised=kernel == POINTWISE and rng.random() < 0.1,
        transient_bytes=rng.choice([0, 0, 0, 1]) if kernel == EXTERN and not plain else 0,
    )


def _random_snapshot(rng: random.Random, index: int) -> Value:
    """A copy of an input, which only readers that are computed again read."""
    return Value(
        name=f"v{index}",
        nbytes=rng.choice([1, 2, 4]),
        kernel=POINTWISE,
        reads=(),
        time_ns=2,
        save_time_ns=2,
        pin=SAVE,
        in_forward=False,
        is_snapshot=True,
    )


def _random_tuple(rng: random.Random, values: list[Value]) -> list[Value]:
    """A node with several outputs, then its outputs."""
    first = len(values)
    kernel = rng.choice([EXTERN, REDUCTION])
    whole = Value(f"v{first}", 0, kernel, _pick(rng, values), rng.randint(1, 6), transient_bytes=rng.choice([0, 3]))
    count = rng.randint(1, 2)
    items = [Value(f"v{first + 1 + k}", rng.choice([1, 2, 4]), ITEM, (first,), 0) for k in range(count)]
    return [whole, *items]


def _with_memory_of_kernels(
    rng: random.Random, values: list[Value], steps: list[Step]
) -> tuple[list[Value], list[Step]]:
    """Some kernels with workspaces, some steps that are the last to read a copied input."""

    def workspace(node: Value | Step) -> int:
        return rng.choice([0, 0, 0, 2]) if node.kernel == EXTERN else 0

    def order() -> bool:
        return rng.random() < 0.2

    values = [
        replace(
            v,
            workspace_bytes=workspace(v),
            held_bytes=rng.choice([0, 0, 0, 0, 3]) if v.in_forward and v.kernel == POINTWISE else 0,
            is_channels_last=order(),
            copies=v.reads[:1] if v.kernel == EXTERN and rng.random() < 0.1 else (),
            **_ordered(rng, v),
            gradient_readers=tuple(sorted({rng.randrange(len(steps)) for _ in range(2)})) if v.is_output else (),
        )
        for v in values
    ]
    values = _with_parts(rng, values)
    copies = [rng.choice([0, 0, 0, 0, 1]) for _ in steps]
    steps = [
        replace(
            s,
            workspace_bytes=workspace(s),
            held_bytes=nbytes,
            is_channels_last=order(),
            copies=s.reads[:1] if s.kernel == EXTERN and rng.random() < 0.2 else (),
        )
        for s, nbytes in zip(steps, copies, strict=True)
    ]
    return values, steps


def _with_parts(rng: random.Random, values: list[Value]) -> list[Value]:
    """Some pointwise values with a buffer whose pointwise sources are made in it, each in one only."""
    taken: set[int] = set()
    made: list[Value] = []
    for v, value in enumerate(values):
        parts: tuple[int, ...] = ()
        if value.kernel == POINTWISE and value.realised and v not in taken and rng.random() < 0.5:
            fits = [values[r].kernel == POINTWISE and not (values[r].is_output or made[r].parts) for r in value.reads]
            parts = tuple(r for r, fit in zip(value.reads, fits, strict=True) if fit and r not in taken)
            taken.update(parts)
        made.append(replace(value, parts=parts))
    return made


def _ordered(rng: random.Random, value: Value) -> dict[str, Any]:
    """A concatenation that is copied unless what it reads is saved."""
    if value.kernel != POINTWISE or not value.reads or not value.nbytes or rng.random() > 0.2:
        return {}
    return {"ordered_by": value.reads[:1], "transient_bytes": value.nbytes}


def _pick(rng: random.Random, values: list[Value]) -> tuple[int, ...]:
    """Some earlier values, mostly recent ones; never a tuple."""
    whole = [v for v, value in enumerate(values) if value.nbytes]
    near = whole[-3:] if rng.random() < 0.7 else whole
    return tuple(sorted(rng.sample(near, rng.randint(0 if not near else 1, min(3, len(near))))))


def _random_late(rng: random.Random, shape: Shape, first: int, values: list[Value], num_steps: int) -> list[Value]:
    """Values that only the backward needs; those from some point on stand among the steps."""
    late: list[Value] = []
    if shape.extern_only:
        return late
    stands = sorted(rng.choice([-1, *range(1, num_steps + 1)]) for _ in range(rng.randint(0, shape.max_late)))
    for k, late_step in enumerate(stands):
        drawn = _random_value(rng, shape, first + k, rng.choice([POINTWISE, POINTWISE, EXTERN]), ())
        reads = _pick(rng, values + late)
        changes = {"reads": reads, "in_forward": False, "is_output": False, "late_step": late_step}
        late.append(Value(**{**drawn.__dict__, **changes}))
    return late


def _random_steps(rng: random.Random, shape: Shape, values: list[Value], num_steps: int) -> list[Step]:
    steps: list[Step] = []
    for _ in range(num_steps):
        b = len(steps)
        kernel = EXTERN if shape.extern_only else rng.choice([POINTWISE, POINTWISE, EXTERN, EXTERN, REDUCTION, ITEM])
        readable = [v for v, value in enumerate(values) if value.nbytes and value.late_step <= min(b, num_steps)]
        reads = tuple(sorted(rng.sample(readable, rng.randint(0, min(2, len(readable))))))
        whole = [g for g, s in enumerate(steps) if s.nbytes]
        grads = tuple(sorted({*whole[-1:], *rng.sample(whole, min(len(whole), rng.randint(0, 1)))}))
        nbytes = rng.choice([1, 2, 4, 4])
        realised = kernel == POINTWISE and rng.random() < 0.1
        if kernel == ITEM:
            steps.append(Step(f"s{b}", 0, EXTERN, reads, grads, 1, transient_bytes=rng.choice([0, 2])))
            reads, grads = (), (b,)
        steps.append(Step(f"s{len(steps)}", nbytes, kernel, reads, grads, 1, realised=realised))
    read = {g for s in steps for g in s.gradients}
    steps = [
        Step(**{**s.__dict__, "is_output": s.nbytes > 0 and (g not in read or rng.random() < 0.15)})
        for g, s in enumerate(steps)
    ]
    returned = [v for v, value in enumerate(values) if value.nbytes and not value.is_output and not shape.extern_only]
    reads = (rng.choice(returned),) if returned and rng.random() < 0.1 else ()
    return [*steps, Step("output", 0, CONSTANT, reads, tuple(g for g, s in enumerate(steps) if s.is_output))]


def _positions(values: list[Value]) -> list[int]:
    """Places with every value that the forward does not need right behind what it reads."""
    order: list[int] = [v for v, value in enumerate(values) if value.in_forward]
    for v, value in enumerate(values):
        if not value.in_forward:
            behind = max((order.index(u) for u in value.reads), default=-1)
            order.insert(behind + 1, v)
    return [order.index(v) for v in range(len(values))]
