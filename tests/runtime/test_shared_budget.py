"""Several compiled graphs in one step, under one budget, as the allocator sees it.

The first step is inside the budget where Dynamo says which graphs it has; with callables compiled separately, the second one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat import BudgetError, PlannerWarning, SharedBudgetError
from compile_remat._util.units import format_bytes
from compile_remat.backend import remat
from compile_remat.compilation.driver import Compilation
from compile_remat.device.measure import peak_bytes
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.runtime import shared_budget
from compile_remat.runtime.process_state import clear_process_state

pytestmark = pytest.mark.usefixtures("own_caches")

WIDTH, ROWS = 64, 1024
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
EAGER_BYTES = 64
"""Bytes that a step allocates beside its compiled graphs: the loss and its gradient."""


class Block(nn.Module):
    """Worth recomputing: five values of the input's size between two matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(torch.tanh(self.first(x))) * torch.cos(x)
        return torch.tanh(self.second(x).exp().sin())


class Model(nn.Module):
    """Blocks in a row; the loss is compiled apart so that nothing large is allocated outside of compiled graphs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


def pieces(model: Model, ends: list[int]) -> Callable[[Tensor], Tensor]:
    """One function with a graph break behind each of `ends`."""

    def part(first: int, last: int, x: Tensor) -> Tensor:
        for block in model.blocks[first:last]:
            x = block(x)
        return x

    def function(x: Tensor) -> Tensor:
        x = part(0, ends[0], x)
        torch._dynamo.graph_break()
        x = part(ends[0], ends[1], x)
        torch._dynamo.graph_break()
        x = part(ends[1], ends[2], x)
        torch._dynamo.graph_break()
        return mean_square(part(ends[2], len(model.blocks), x))

    return function


def by_block(options: dict[str, Any] | None) -> tuple[Model, Callable[[Tensor], Tensor]]:
    model = Model(12)
    for block in model.blocks:
        block.compile(**options or {})
    loss = torch.compile(mean_square, **options or {})
    return model, lambda x: loss(model(x))


def broken(options: dict[str, Any] | None) -> tuple[Model, Callable[[Tensor], Tensor]]:
    model = Model(8)
    return model, torch.compile(pieces(model, [2, 4, 6]), **options or {})


def apart(options: dict[str, Any] | None) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    encoder, decoder = Model(3), Model(5)
    first = torch.compile(encoder, **options or {})
    second = torch.compile(lambda x: mean_square(decoder(x)), **options or {})
    return nn.ModuleList([encoder, decoder]), lambda x: second(first(x))


def halved(options: dict[str, Any] | None) -> tuple[Model, Callable[[Tensor], Tensor]]:
    model = Model(8)

    def function(x: Tensor) -> Tensor:
        for block in model.blocks[:4]:
            x = block(x)
        torch._dynamo.graph_break()
        for block in model.blocks[4:]:
            x = block(x)
        return mean_square(x)

    return model, torch.compile(function, **options or {})


CASES = {"by block": by_block, "three graph breaks": broken, "one graph break": halved, "apart": apart}


class Steps:
    """A model that trains; each step gives its gradients and its peak."""

    def __init__(self, case: str, budget: object = None, **options: Any) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        wrap = (
            {"backend": "inductor"}
            if budget is None
            else {"backend": remat, "options": {"memory_budget": budget, **options}}
        )
        self.model, self.call = CASES[case](wrap)

    def step(self) -> tuple[list[Tensor], int]:
        gradients: list[Tensor] = []

        def run() -> None:
            self.call(X).backward()
            for p in self.model.parameters():
                assert p.grad is not None
                gradients.append(p.grad)
                p.grad = None

        gc.collect()
        return gradients, peak_bytes(run, "cpu").peak_bytes


@pytest.mark.parametrize("share", [pytest.param(0.6, marks=pytest.mark.full), 0.4])
@pytest.mark.parametrize(
    "case", ["three graph breaks", *(pytest.param(case, marks=pytest.mark.full) for case in ("by block", "apart"))]
)
def test_the_whole_step_stays_inside(case: str, share: float) -> None:
    plain = Steps(case)
    plain.step()
    expected, default_bytes = plain.step()
    budget_bytes = max(int(share * default_bytes), 1 << 20)
    steps = Steps(case, budget_bytes)
    seen = [steps.step() for _ in range(4)]
    promised = 0 if case == "three graph breaks" else 1
    for k, (gradients, peak) in enumerate(seen):
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
        assert peak <= budget_bytes + EAGER_BYTES or k < promised
    if promised == 0:
        assert seen[1][1] > seen[0][1]  # the first step is conservative: plans are chosen when all graphs are known
    assert seen[-1][1] == seen[-2][1] > 0.6 * budget_bytes
    last = compile_remat.reports()[-1]
    assert "in a step" in last.message
    assert last.status != "FALLBACK"


@pytest.mark.parametrize(
    ("case", "fraction"),
    [
        ("apart", 0.6),
        pytest.param("by block", 0.7, marks=pytest.mark.full),
        pytest.param("three graph breaks", 0.5, marks=pytest.mark.full),
    ],
)
def test_min_and_a_fraction(case: str, fraction: float) -> None:
    plain = Steps(case)
    plain.step()
    expected, default_bytes = plain.step()
    peaks = {}
    for budget in ("min", fraction):
        steps = Steps(case, budget)
        for _ in range(4):
            gradients, peaks[budget] = steps.step()
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert peaks["min"] < peaks[fraction] <= fraction * default_bytes * 1.03


def test_reports_tell_which_plans_run_now_and_what_the_step_takes() -> None:
    budget_bytes = 9 << 19
    steps = Steps("one graph break", budget_bytes, compiler="eager")
    for _ in range(3):
        steps.step()
    reports = compile_remat.reports()
    running = [report for report in reports if report.runs_now]
    assert len(running) == len({report.region for report in running}) == len({report.region for report in reports}) == 2
    assert running == reports[-2:]
    assert len(reports) > 2
    for report in running:
        assert report.step_budget_bytes == budget_bytes
        assert report.step_peak_bytes is not None
        assert max(r.predicted_peak_bytes or 0 for r in running) < report.step_peak_bytes <= budget_bytes
    assert all(report.step_peak_bytes is None for report in reports if not report.runs_now)
    assert "replaced        by a later plan" in str(reports[0])


def test_below_what_the_step_needs_is_an_error() -> None:
    with pytest.raises(SharedBudgetError) as caught:
        steps = Steps("by block", 2 << 20, compiler="eager")
        for _ in range(3):
            steps.step()
    assert isinstance(caught.value, BudgetError)
    assert caught.value.floor_bytes > caught.value.budget_bytes


def test_a_first_graph_that_needs_too_much_by_itself_is_an_error_of_this_graph() -> None:
    with pytest.raises(BudgetError, match="the lowest reachable peak of this graph") as caught:
        Steps("by block", "500KiB", compiler="eager").step()
    assert not isinstance(caught.value, SharedBudgetError)


@pytest.mark.proof
@pytest.mark.usefixtures("empty_kernels")
def test_copies_of_weights_are_held_while_other_graphs_run() -> None:
    """The forward of a convolution's graph makes them in the kernel's order and hands them to its backward: 9 MiB here."""
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()) for _ in range(8)])
    x = torch.linspace(-1, 1, 4 * 256 * 64).reshape(4, 256, 8, 8)

    def loss(x: Tensor) -> Tensor:
        x = model[:4](x)
        torch._dynamo.graph_break()
        return mean_square(model[4:](x))

    def peak(budget: object) -> int:
        torch.compiler.reset()
        call = torch.compile(loss, backend=remat, options={"memory_budget": budget})
        found = 0
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            found = peak_bytes(lambda: call(x).backward(), "cpu").peak_bytes
        return found

    with pytest.raises(SharedBudgetError) as caught:
        peak("20MiB")
    budget_bytes = int(1.01 * caught.value.floor_bytes)
    assert 0.95 * budget_bytes < peak(budget_bytes) <= budget_bytes + EAGER_BYTES


def test_a_fraction_is_of_what_plain_takes_for_the_whole_step() -> None:
    steps = Steps("three graph breaks", 0.5, compiler="eager")
    for _ in range(2):
        steps.step()
    reports = compile_remat.reports()
    alone = max(report.plain.peak_bytes for report in reports if report.plain is not None)
    assert largest_plain_bytes("cpu") > 1.5 * alone
    assert f"of {format_bytes(largest_plain_bytes('cpu') // 2)}" in reports[-1].message


@pytest.mark.usefixtures("empty_kernels")
def test_the_first_step_of_a_broken_function_is_not_above_plains() -> None:
    """Under `min` and a fraction too, where nothing bounds the first plan but its own peak."""
    plain = Steps("three graph breaks")
    plain.step()
    default_bytes = plain.step()[1]
    for budget in ("min", 0.5, 4 * default_bytes):
        clear_process_state()
        steps = Steps("three graph breaks", budget)
        first, second = (steps.step()[1] for _ in range(2))
        assert first <= default_bytes, budget
        if isinstance(budget, float):
            assert max(first, second) <= budget * default_bytes * 1.01 + EAGER_BYTES
        if budget == "min":
            assert first <= 1.02 * second  # lean from the first step on; the second one knows all graphs


@pytest.mark.parametrize("case", ["three graph breaks", "apart"])
def test_a_fraction_below_what_the_step_needs_is_the_lowest_peak_and_a_warning(case: str) -> None:
    with pytest.warns(
        PlannerWarning, match=r"memory_budget = 0\.01 allows .* runs of compiled graphs need .* in a step"
    ):
        steps = Steps(case, 0.01, compiler="eager")
        for _ in range(3):
            steps.step()
    assert "in a step" in compile_remat.reports()[-1].message


@pytest.mark.parametrize("budget", [0.5, "min"])
def test_the_graph_behind_the_last_break_is_compiled_once(budget: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is planned the step is known; only the graph before the break may get a plan that is worth compiling."""
    compiled: list[str] = []
    run = Compilation.run

    def count(compilation: Compilation, *args: Any, **kwargs: Any) -> Any:
        done = run(compilation, *args, **kwargs)
        compiled.append(done[1][0].graph_key)
        return done

    monkeypatch.setattr(Compilation, "run", count)
    steps = Steps("one graph break", budget, compiler="eager")
    for _ in range(3):
        steps.step()
    assert len(compiled) == 3 and compiled.count(compiled[1]) == 1
    last = compile_remat.reports()[-1]
    assert last.graph_key == compiled[1] and "runs once in a step beside 1 other graph" in last.message


@pytest.mark.usefixtures("empty_kernels")
def test_how_often_a_block_runs_may_be_given() -> None:
    steps = Steps("by block", 10 << 20, instances=12)
    peaks = [steps.step()[1] for _ in range(3)]
    assert all(peak <= (10 << 20) + EAGER_BYTES for peak in peaks)
    lean = Steps("by block", "min")
    assert peaks[0] > lean.step()[1]  # no lean first step


def test_what_ran_under_another_budget_is_no_peer() -> None:
    alive = []
    for budget in ("max", 0.6):
        model = Model(6)
        options = {"memory_budget": budget, "compiler": "eager"}
        alive.append((model, torch.compile(model, backend=remat, options=options)))
        mean_square(alive[-1][1](X)).backward()
    assert compile_remat.reports()[-1].offers == ()


@pytest.mark.parametrize("budget", [0.6, 4 << 20])
def test_a_graph_break_that_no_graph_follows(budget: object) -> None:
    """Planned conservatively for the sake of graphs that do not exist: from the second step on without peers."""

    def compiled(model: Model, *, breaks: bool) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            y = mean_square(model(x))
            if breaks:
                torch._dynamo.graph_break()
            return y

        return torch.compile(loss, backend=remat, options={"memory_budget": budget, "compiler": "eager"})

    compiled(Model(6), breaks=False)(X).backward()
    (exclusive,) = compile_remat.reports()
    compile_remat.reset_reports()
    torch.compiler.reset()
    call = compiled(Model(6), breaks=True)
    plans = []
    for _ in range(4):
        call(X).backward()
        plans.append(compile_remat.reports()[-1].plan)
    assert plans[0] is not None and exclusive.plan is not None
    assert plans[0].saved_bytes < exclusive.plan.saved_bytes
    assert [p and p.saved for p in plans[1:]] == [exclusive.plan.saved] * 3
    assert [bool(r.offers) for r in compile_remat.reports()] == [True, False]


def test_a_graph_that_is_compiled_anew_expects_the_peers_of_the_last_step() -> None:
    """Another size of the input: what ran says that there are peers, so the budget holds from that step on."""
    steps = Steps("apart", 8 << 20, compiler="eager")
    for _ in range(2):
        steps.step()
    compile_remat.reset_reports()
    steps.call(X[: ROWS // 2]).backward()
    encoder, *_, decoder = compile_remat.reports()  # between them, the step before has ended and its plans were chosen
    assert encoder.offers and decoder.offers


@pytest.mark.usefixtures("empty_kernels")
def test_a_peer_that_runs_in_every_other_step() -> None:
    """As a discriminator that is trained alone and then beside a generator: its plan stays inside beside the other one."""
    first, second = Model(6), Model(6)
    options = {"memory_budget": 6 << 20}
    generator, critic = (torch.compile(model, backend=remat, options=options) for model in (first, second))

    def both() -> None:
        mean_square(critic(generator(X))).backward()
        for model in (first, second):
            model.zero_grad()

    leaf = X.clone().requires_grad_()
    loss_bytes = peak_bytes(lambda: mean_square(leaf).backward(), "cpu").peak_bytes  # in eager mode, beside the graphs
    peaks = []
    for _ in range(4):
        mean_square(critic(X)).backward()
        second.zero_grad()
        gc.collect()
        peaks.append(peak_bytes(both, "cpu").peak_bytes)
    assert peaks[0] > options["memory_budget"] + loss_bytes >= peaks[-1]


@pytest.mark.usefixtures("empty_kernels")
def test_a_model_that_turns_out_to_run_twice() -> None:
    """Nothing says beforehand that two forwards of one graph wait for one backward."""
    model = Model(4)
    call = torch.compile(lambda x: mean_square(model(x)), backend=remat, options={"memory_budget": 4 << 20})

    def step() -> None:
        (call(X) + call(X + 1)).backward()

    with pytest.warns(PlannerWarning, match="planned as if they were alone"):
        step()
    seen = []
    for _ in range(4):
        gc.collect()
        seen.append(peak_bytes(step, "cpu").peak_bytes - 2 * X.nbytes)
    assert seen[-1] <= 4 << 20
    assert any(r.offers for r in compile_remat.reports())


def test_a_step_is_not_taken_for_the_one_of_a_dropped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives the `id` of a dropped object to a new one, at worst all of them."""
    monkeypatch.setattr(shared_budget, "id", lambda value: 1, raising=False)  # never asked for
    for _ in range(2):
        steps = Steps("three graph breaks", 4 << 20, compiler="eager")
        compile_remat.reset_reports()
        for _ in range(3):
            steps.step()
        assert (
            "in a step" in compile_remat.reports()[-1].message
        )  # the joint allocation chose plans for this model, too
