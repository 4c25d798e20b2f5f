"""Planning that takes too long by the clock: the best plan so far runs and is kept nowhere."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import compile_remat
from compile_remat import api
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.backend import remat
from compile_remat.compilation.readings import PlanRefused
from compile_remat.compilation.rounds import Rounds
from compile_remat.errors import BudgetError, PlannerWarning
from compile_remat.passes import Planner
from compile_remat.planning import deadline
from compile_remat.planning.deadline import Deadline, deadline_of, noting_early_end, with_search_message
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.request import ChosenPlan, FitBelow, Request, Resume, target_bytes_of
from compile_remat.planning.settings import Settings
from compile_remat.ranks.board import num_ranks
from tests.correctness.harness import RUNS_UNFUSED
from tests.oracles.random_problems import seeded_problem
from tests.passes.problem.test_work_budget import LARGE
from tests.planning.test_joint_planning import Traced, gradients

TEXT = "planning was stopped by the clock after"


class FakeClock:
    """Seconds that pass from one look at the clock to the next."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s, self.looks = 0.0, step_s, 0

    def __call__(self) -> float:
        self.looks += 1
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture(autouse=True)
def _fresh(own_caches: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    counters.clear()
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True):
        yield


@pytest.fixture(autouse=True)
def _inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets are close to the floors of small models: copies of inputs would be above them."""
    monkeypatch.setenv("REMAT_INPUTS", "constant")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock by which everything takes too long."""
    clock = FakeClock(1000.0)
    monkeypatch.setattr(deadline, "monotonic", clock)
    return clock


def mlp(layers: int = 16, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def step(model: nn.Module, **keywords: Any) -> tuple[list[torch.Tensor], list[str]]:
    """Gradients of one step of a copy, compiled with these arguments of `torch.compile` if any; and the warnings of ours."""
    torch.compiler.reset()
    compile_remat.reset_reports()
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", RUNS_UNFUSED)
        forget_warnings()
        call = torch.compile(model, backend=remat, **keywords) if keywords else model
        call(x).square().sum().backward()
    ours = [str(w.message) for w in seen if w.category is PlannerWarning]
    return [p.grad for p in model.parameters() if p.grad is not None], ours


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def side_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("remat/*") if path.is_file()]  # beside the folder of measured workspaces


# -- the rule -----------------------------------------------------------------------------------------------------------


def test_how_long_planning_may_take() -> None:
    problem = seeded_problem(4, LARGE)
    nodes = len(problem.values) + len(problem.steps)
    for work_seconds, limit_s in ((0.01, 60.0), (6.0, 60.0), (20.0, 200.0), (None, 10 * (8 + nodes / 20_000))):
        clock = deadline_of(problem, work_seconds)
        assert clock is not None and clock.limit_s == pytest.approx(limit_s)


def test_the_clock_runs_from_when_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeClock(0.0)
    monkeypatch.setattr(deadline, "monotonic", now)
    now.now_s = 500.0
    clock = deadline_of(seeded_problem(4, LARGE), 1.0)
    assert clock is not None and not clock()
    now.now_s = 559.0
    assert not clock() and clock.elapsed_s == 59.0
    now.now_s = 560.0
    assert clock()


def test_several_ranks_have_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = seeded_problem(4, LARGE)
    assert num_ranks() == 1
    monkeypatch.setattr(deadline, "num_ranks", lambda: 2)
    assert deadline_of(problem, 1.0) is None


# -- what is said -------------------------------------------------------------------------------------------------------


def test_the_limit_of_work_is_named_where_another_plan_may_be_better() -> None:
    problem = seeded_problem(4, LARGE)
    planner = Planner(problem, 1e-9)
    plan = planner.lowest()
    with pytest.warns(PlannerWarning, match="ended at its limit of work"):
        found = with_search_message(ChosenPlan(plan, plan.peak_bytes, "one thing"), planner)
    assert found.message == (
        "one thing; the search for a plan ended at its limit of work (time_limit); a larger one may find a lower plan"
    )


@pytest.mark.filterwarnings("error::compile_remat.PlannerWarning")
def test_nothing_is_said_of_a_plan_near_its_bound_or_a_search_that_came_to_its_end() -> None:
    problem = seeded_problem(4, LARGE)
    limited, free = Planner(problem, 1e-9), Planner(problem)
    limited.lowest()
    near = ChosenPlan(limited.fastest())
    assert near.plan.gap == 0 and limited.ends and with_search_message(near, limited) is near
    low = ChosenPlan(free.lowest(), 1)
    assert with_search_message(low, free) is low


def test_an_error_says_that_the_search_ended_early() -> None:
    problem = seeded_problem(4, LARGE)
    for planner, text in (
        (Planner(problem, 1e-9), "limit of work"),
        (Planner(problem, None, Deadline(0.0, 0.0)), "the clock"),
    ):
        with pytest.raises(BudgetError) as caught, noting_early_end(planner):
            planner.lowest()
            raise BudgetError(1, 2)
        assert text in caught.value.__notes__[0]
    with pytest.raises(BudgetError) as caught, noting_early_end(Planner(problem)):
        raise BudgetError(1, 2)
    assert not hasattr(caught.value, "__notes__")


# -- what runs ----------------------------------------------------------------------------------------------------------


def test_a_stopped_plan_runs_and_is_kept_nowhere(
    late: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, plans = mlp(), tmp_path / "plans"
    expected, _ = step(model)
    options = {"memory_budget": 0.8, "plan_dir": str(plans)}
    for _ in range(2):  # the second time nothing is found of the first
        actual, said = step(model, options=options)
        assert_same(actual, expected)
        (report,) = compile_remat.reports()
        assert TEXT in report.message and "is not cached" in report.message and not report.from_cache
        assert report.status == "FEASIBLE" and report.plan.peak_bytes <= report.budget_bytes
        assert [TEXT in text for text in said] == [True]
        assert not plans.exists() and not side_files(tmp_path)
        assert counters["aot_autograd"]["autograd_cache_saved"] == 0

    monkeypatch.undo()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    del options["plan_dir"]
    for from_cache in (False, True):
        actual, said = step(model, options=options)
        assert_same(actual, expected)
        (report,) = compile_remat.reports()
        assert (report.from_cache, report.message, said) == (from_cache, "", [])
        assert counters["aot_autograd"]["autograd_cache_saved"] == 1
    assert len(side_files(tmp_path)) == 2  # one with plain's facts, and one that leads another process there


@pytest.mark.usefixtures("empty_kernels")
def test_a_plan_in_time_has_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(1e-6)
    monkeypatch.setattr(deadline, "monotonic", clock)
    _, said = step(mlp(), options={"memory_budget": 0.8})
    assert clock.looks > 2 and said == [] and compile_remat.reports()[0].message == ""


@pytest.mark.parametrize(
    "options",
    [
        {"compiler": "eager"},
        {"check": True},
        {"compiler": "eager", "check": True},
        pytest.param({"memory_budget": "min"}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_a_stopped_plan_runs_under_every_setting(late: FakeClock, options: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    expected, _ = step(model)
    actual, said = step(model, options={"memory_budget": 0.8, "plan_dir": str(tmp_path / "plans"), **options})
    assert_same(actual, expected)
    (report,) = compile_remat.reports()
    compilations = 2 if "check" in options else 1  # the plan that is compared is compiled by itself
    assert TEXT in report.message and [TEXT in text for text in said] == [True] * compilations
    assert report.check == ("passed" if "check" in options else "")
    assert not (tmp_path / "plans").exists() and not side_files(tmp_path)


@pytest.mark.usefixtures("empty_kernels")
def test_only_past_a_cache_is_a_graph_compiled_once_more(late: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []

    def planned(graph: Any, settings: Settings, request: Request, context: Any) -> Any:
        seen.append(request)
        return plan_graph(graph, settings, request, context)

    monkeypatch.setattr("compile_remat.partitioning.joint_split.plan_graph", planned)
    for options, fresh in (
        ({}, [True, False]),
        ({"compiler": "eager"}, [True]),
        ({"compiler": "eager", "check": True}, [True, True]),
    ):
        seen.clear()
        step(mlp(), options={"memory_budget": 0.8, **options})
        assert [not isinstance(request, Resume) for request in seen] == fresh
    seen.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        step(mlp(), options={"memory_budget": 0.8})
    assert [not isinstance(request, Resume) for request in seen] == [True]


def test_any_size_and_regions(late: FakeClock, tmp_path: Path) -> None:
    model = mlp()
    expected, _ = step(model)
    actual, _ = step(model, options={"memory_budget": 0.8}, dynamic=True)
    assert_same(actual, expected)
    assert [TEXT in report.message for report in compile_remat.reports()] == [True]

    layer = torch.compiler.nested_compile_region(lambda x, linear: torch.sin(linear(x)))

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for each in self.layers:
                x = layer(x, each)
            return x

    torch.manual_seed(0)
    model = Regions()
    expected, _ = step(model)
    actual, _ = step(model, options={"memory_budget": "min"})
    assert_same(actual, expected)
    assert all(TEXT in report.message for report in compile_remat.reports())
    assert not side_files(tmp_path)


def test_code_that_needs_more_than_the_budget_is_planned_again(
    late: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan for less is stopped as well, and of neither anything is kept."""
    asked: list[int | None] = []

    def judge(rounds: Rounds, reports: Any, run: object) -> None:
        asked.append(target_bytes_of(rounds.partitioner.request))
        if len(asked) == 1:
            request = FitBelow(int(0.95 * reports[0].budget_bytes))
            rounds.partitioner = replace(rounds.partitioner, request=request)
            raise PlanRefused

    monkeypatch.setattr(Rounds, "judge", judge)
    model = mlp()
    expected, _ = step(model)
    actual, said = step(model, options={"memory_budget": 0.9})
    assert_same(actual, expected)
    (report,) = compile_remat.reports()
    assert asked == [None, int(0.95 * report.budget_bytes)]
    assert report.plan.peak_bytes <= asked[1] and TEXT in report.message and len(said) == 2
    assert not side_files(tmp_path)


def test_offers_survive(late: FakeClock, tmp_path: Path) -> None:
    """A block that runs twice in a step shares the budget with itself."""
    model = mlp()
    expected, _ = step(model)
    actual, said = step(model, options={"memory_budget": "1MiB", "instances": 2})
    assert_same(actual, expected)
    (report,) = compile_remat.reports()
    assert report.offers and TEXT in report.message and len(said) == 1
    assert not side_files(tmp_path)


def test_a_graph_that_runs_twice_in_a_step(late: FakeClock) -> None:
    """The graph is compiled again for the second step, with fake inputs, under the plan that was chosen for the graph."""
    model = mlp()
    x = torch.randn(512, 8)

    def loss(call: Any) -> torch.Tensor:
        return call(call(x)).square().sum()

    twin = copy.deepcopy(model)
    loss(twin).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlannerWarning)
        call = torch.compile(model, backend=remat, options={"memory_budget": "1MiB"})
        for _ in range(3):
            model.zero_grad()
            loss(call).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])  # type: ignore[misc]
    assert len(compile_remat.reports()) > 1 and any(TEXT in report.message for report in compile_remat.reports())


def test_looking_takes_the_plan_as_it_is(late: FakeClock, tmp_path: Path) -> None:
    x = torch.randn(512, 8)
    with pytest.warns(PlannerWarning, match=TEXT):
        report = api.explain(mlp(), x, memory_budget=0.8, plan_dir=str(tmp_path / "plans"), compiler="eager")
    assert TEXT in report.message and report.plan is not None and report.plan.is_feasible
    assert not (tmp_path / "plans").exists()


def test_partition_takes_the_plan_as_it_is(late: FakeClock) -> None:
    def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.sin(x @ weight)
        return x

    torch.manual_seed(0)
    inputs = [torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (256, *[16] * 8)]
    with pytest.warns(PlannerWarning, match=TEXT):
        actual = gradients(Traced(chain, memory_budget=0.8).call, inputs)
    torch.testing.assert_close(actual, gradients(chain, inputs))


@contextmanager
def installed(**settings: Any) -> Iterator[None]:
    compile_remat.install(**settings)
    try:
        yield
    finally:
        compile_remat.uninstall()


def test_there_is_no_clock_where_nobody_could_compile_once_more(late: FakeClock) -> None:
    model = mlp()
    expected, _ = step(model)
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    with installed(memory_budget=0.8):
        torch.compile(twin)(torch.randn(512, 8)).square().sum().backward()
    assert_same([p.grad for p in twin.parameters()], expected)  # type: ignore[misc]
    (report,) = compile_remat.reports()
    assert report.message == ""
