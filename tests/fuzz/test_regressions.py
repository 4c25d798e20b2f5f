"""Failures that `make fuzz` found, shrunk: paste the literal from its file and say above it what was wrong."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check
from tests.fuzz.compiled import check_compiled
from tests.fuzz.program import Leaf, Op, Program
from tests.fuzz.trial import Trial

X, W = Leaf("d0", "differentiable", (2, 3)), Leaf("p1", "parameter", (3,))
START = Op("v0", "mul", ("d0", "p1"))

REGRESSIONS = {
    # A graph that was traced again in one process had other names: the plan that the step shares out could not be compiled.
    "traced again behind a graph break": Trial(
        Program(
            (Leaf("d0", "differentiable", (6, 8, 24, 16)), Leaf("p1", "parameter", (16,))),
            (
                START,
                Op("v1", "sum", ("v0",), (0, False)),
                Op("v2", "cumprod", ("d0",), (0,)),
                Op("v4", "cubed_function", ("v1",)),
                Op("v6", "graph_break", ("v0",)),
                Op("v10", "var", ("v2",), (-1, True)),
            ),
            ("v10", "v4"),
        ),
        "dynamo",
        ("bytes",),
        dynamic=True,
        compiler="inductor",
    ),
    # The check itself: torch copies the gradient of an output with gaps, and gives the copy the gaps as well.
    "output with gaps": Trial(
        Program(
            (Leaf("d0", "differentiable", (64, 64)), Leaf("p1", "parameter", (64,))),
            (START, Op("v1", "mul_", ("v0", "d0")), Op("v2", "select", ("v0",), (-1, 28))),
            ("v2",),
        ),
        "dynamo",
        ("bytes",),
        compiler="inductor",
    ),
    # The check itself: torch adds the gradients of an output that is a leaf outside of compiled code, and copies the sum.
    "output that is a leaf": Trial(
        Program((Leaf("d0", "differentiable", (64, 64)), Leaf("p1", "parameter", (64,))), (START,), ("v0", "d0")),
        "dynamo",
        ("min",),
        compiler="inductor",
    ),
    # The check itself: the graph before the break has no gradient and is not planned; what it hands on is in no dry run.
    "graph that is not planned before a graph break": Trial(
        Program(
            (
                Leaf("d0", "differentiable", (96, 48)),
                Leaf("p1", "parameter", (48,)),
                Leaf("i2", "input", (96,), "int64", 96),
                Leaf("f3", "frozen", (96, 48)),
                Leaf("i4", "input", (96,), "int64", 96),
                Leaf("p5", "parameter", (96, 48)),
            ),
            (
                START,
                Op("v1", "detach", ("v0",)),
                Op("v2", "add", ("v1", "v1")),
                Op("v3", "loss_of_head", ("v2", "f3", "i2"), (0.0, "mean", -100)),
                Op("v4", "graph_break", ("v3",)),
                Op("v5", "loss_of_head", ("v2", "p5", "i4"), (0.0, "mean", -100)),
                Op("v6", "gelu", ("v2",)),
                Op("v7", "dropout", ("v6",)),
            ),
            ("v5",),
        ),
        "dynamo",
        ("min",),
        compiler="inductor",
        slices=3,
    ),
    # In a plan that was compiled in a later step, FX kept the mask that nobody reads, and drew it.
    "random numbers without a reader before a graph break": Trial(
        Program(
            (X, W),
            (
                START,
                Op(
                    "v4",
                    "autocast",
                    ("c1", "v0"),
                    (),
                    (Op("v2", "detach", ("c1",)), Op("v3", "dropout", ("v2",)), Op("v5", "sin", ("v2",))),
                ),
                Op("v6", "graph_break", ("v4",)),
                Op("v7", "silu", ("v6",)),
            ),
            ("v0", "v7"),
        ),
        "dynamo",
        ("min",),
    ),
    # Plain torch.compile computes sin(buffer) again after the forward has changed the buffer (torch 2.13).
    "buffer read, then changed, beside random numbers": Trial(
        Program(
            (X, W, Leaf("b2", "buffer", (1,))),
            (START, Op("v1", "read_then_add_", ("v0", "b2")), Op("v2", "normal", ("v1",))),
            ("v2",),
        ),
        "dynamo",
        ("max",),
        dynamic=True,
    ),
    # Only the backward asks for the size of `cat`'s copy: the copy, and what it is made of, was computed again for that.
    "size of a value that is not saved": Trial(
        Program(
            (X, W),
            (
                START,
                Op("v1", "sin", ("v0",)),
                Op("v2", "sin", ("v1",)),
                Op("v3", "cat", ("v2", "v2"), (-1,)),
                Op("v4, v5", "topk", ("v3",), (1,)),
            ),
            ("v4",),
        ),
        dynamic=True,
    ),
    # The same of a view that only the backward takes.
    "size of a view in the backward": Trial(
        Program(
            (
                Leaf("d0", "differentiable", (2, 2, 3, 2)),
                Leaf("p1", "parameter", (2,)),
                Leaf("p2", "parameter", (2, 2)),
                Leaf("f3", "frozen", (2,)),
            ),
            (
                START,
                Op("v1", "sin", ("v0",)),
                Op("v2", "linear_bias", ("v1", "p2", "f3")),
                Op("v3", "alpha_dropout", ("v2",)),
                Op("v4", "add_", ("v3", "v1")),
                Op("v5", "diagonal", ("v4",)),
                Op("v6", "relu_", ("v5",)),
            ),
            ("v6",),
        ),
        budgets=("min",),
        masks=(0, 1, 2, 3),
        dynamic=True,
    ),
    # The gradient is zero whatever comes in; torch leaves the random node in the backward, where nothing reads it.
    "backward that reads no tangent": Trial(
        Program(
            (X, W),
            (
                START,
                Op("v1", "detach", ("v0",)),
                Op("v2", "cumsum", ("v0",), (-1,)),
                Op("v3", "uniform", ("v2",)),
                Op("v4", "copy_", ("v3", "v1")),
            ),
            ("v4",),
        ),
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression(name: str) -> None:
    check(REGRESSIONS[name])


@pytest.mark.usefixtures("empty_kernels")
def test_a_plan_for_graphs_out_of_the_cache_is_compiled_though_torch_made_a_symbol_of_a_scalar() -> None:
    """Only what was compiled has been through the pass that asks Dynamo to take the scalar buffer's value for a number."""
    program = Program(
        (
            Leaf("i0", "input", (12, 40, 32)),
            Leaf("f1", "frozen", (32,)),
            Leaf("p2", "parameter", (32, 32)),
            Leaf("p3", "parameter", (32, 32)),
            Leaf("b4", "buffer", ()),
        ),
        (
            Op("v0", "mul", ("i0", "f1")),
            Op("v1", "linear", ("v0", "p2")),
            Op("v2", "linear", ("v0", "p3")),
            Op("v3", "linear", ("v1", "p2")),
            Op("v4", "tanh", ("v3",)),
            Op("v5", "sdpa", ("v1", "v2", "v4"), (True,)),
            Op("v6, v7", "split", ("i0",), (-1,)),
            Op("v11", "loop", ("c8", "v2"), (3,), (Op("v10", "buffer_copy_", ("v5", "b4")),)),
            Op("v13", "graph_break", ("v6",)),
            Op("v15", "add_number_", ("v11",)),
            Op("v19", "autocast", ("c16", "v3"), (), (Op("v17", "leaky_relu", ("v5",)), Op("v18", "sin", ("v4",)))),
        ),
        ("v19",),
    )
    check_compiled(Trial(program, "dynamo", (0.5,), compiler="inductor"), 0.5, lambda seen, where: None)
