"""The checks see a wrong plan, and drawn programs have the promised properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compile_remat._torch import joint_graph
from compile_remat.passes import Plan, Planner
from tests.fuzz import check as check_module
from tests.fuzz import joint, partitioners
from tests.fuzz.agreement import NumbersDiffer
from tests.fuzz.campaign import drawing
from tests.fuzz.check import check
from tests.fuzz.compiled import Outcome
from tests.fuzz.models import programs, trials
from tests.fuzz.program import Leaf, Op, Program
from tests.fuzz.trial import Trial

X, W, B = Leaf("d0", "differentiable", (2, 3)), Leaf("p1", "parameter", (3,)), Leaf("b2", "buffer", (1,))
START = Op("v0", "mul", ("d0", "p1"))

DRAWN = Program((X, W), (START, Op("v1", "noise", ("v0",)), Op("v2", "sin", ("v1",))), ("v2",))
MUTATED = Program(
    (X, W, B),
    (START, Op("v1", "sin", ("b2",)), Op("v2", "mul", ("v0", "v1")), Op("v3", "average_", ("v2", "b2"))),
    ("v3",),
)


def save_nothing(planner: Planner, seed: int, *, moves: bool = False) -> Plan:
    return planner.plan_of(np.zeros(len(planner.problem.values), dtype=bool), None)


@pytest.mark.parametrize("entry", ["graph", "dynamo"])
@pytest.mark.parametrize("program", [DRAWN, MUTATED], ids=["drawn", "mutated"])
def test_a_plan_without_the_pins_is_caught(program: Program, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(program, entry, ("min",), (0,))
    check(trial)
    monkeypatch.setattr(partitioners, "random_plan", save_nothing)
    with pytest.raises(AssertionError, match="forced plan 0: "):
        check(trial)


def test_numbers_that_inductor_may_choose_are_compared_again_with_weights_that_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last bit of a weight in bfloat16 decided a comparison with a constant in the second step."""
    ran: list[Trial] = []

    def differs_at_first(trial: Trial) -> list[Outcome]:
        ran.append(trial)
        if trial.learning_rate:
            raise NumbersDiffer("a weight")
        return []

    monkeypatch.setattr(check_module, "_check_dynamo", differs_at_first)
    coarse = Program((Leaf("d0", "differentiable", (4, 4), "bfloat16"),), (Op("v0", "sin", ("d0",)),), ("v0",))
    assert check(Trial(coarse, "dynamo", compiler="inductor")) == []
    assert [trial.learning_rate > 0 for trial in ran] == [True, False]
    exact = Program((Leaf("d0", "differentiable", (4, 4)),), (Op("v0", "sin", ("d0",)),), ("v0",))
    with pytest.raises(NumbersDiffer):
        check(Trial(exact, "dynamo", compiler="inductor"))


def test_a_recompute_that_was_not_planned_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(DRAWN)
    monkeypatch.setattr(joint, "extract", lambda prepared, plan: extract_all(prepared))

    def extract_all(prepared: joint_graph.Joint) -> object:
        nodes = [n for n in prepared.module.graph.nodes if n.name in ("sin", "cos", "add", "mul")]
        return joint_graph.extract_modules(prepared, [*prepared.info.inputs, *nodes])

    with pytest.raises(AssertionError, match="not the planned one"):
        check(trial)


@drawing(trials("dynamo"), examples=20, seed=0)
def test_a_trial_prints_as_what_makes_it(trial: Trial) -> None:
    assert eval(repr(trial)) == trial
    outputs = trial.program.function()(*trial.program.tensors())
    assert any(t.requires_grad for t in outputs)
    assert all(torch.isfinite(t).all() for t in outputs)


def test_the_leaves_are_the_same_every_time() -> None:
    program = MUTATED
    for first, second in zip(program.tensors(), program.tensors(), strict=True):
        assert torch.equal(first, second)


def test_few_programs_are_turned_down() -> None:
    drawn: list[Program] = []

    @drawing(programs(), examples=100, seed=0)
    def draw(program: Program) -> None:
        drawn.append(program)

    draw()
    assert len(set(drawn)) > 70
    assert np.mean([len(p.kinds) for p in drawn]) > 5
