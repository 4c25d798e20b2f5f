"""The scheduled peak, and planning again where it lies above the budget."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat import BudgetError, PlannerWarning
from compile_remat._util.units import in_one_unit
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.compilation import feedback
from compile_remat.compilation.feedback import Emissions
from compile_remat.compilation.region_run import RegionRun, run_region
from compile_remat.cost_models import load_device
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor import entry
from compile_remat.inductor.light_code import reading
from compile_remat.inductor.observe import Emitted
from compile_remat.partitioning import partitioner
from compile_remat.passes import GraphFacts
from compile_remat.planning.request import FitBelow
from compile_remat.planning.settings import Settings
from compile_remat.report import Report
from tests.compilation.test_region_run import BACKWARD, NAMES, emitted, forward_returning
from tests.inductor.cpp_kernels.counted import Built

pytestmark = pytest.mark.usefixtures("own_caches")

KIB = 1024


class Chain(nn.Module):
    """Wide enough for a budget to matter; the last value is returned and saved."""

    def __init__(self, depth: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x))
        return x.exp()


X = torch.linspace(-1, 1, 512 * 64).reshape(512, 64)


@pytest.fixture(scope="module")
def fastest_bytes() -> int:
    """The peak of the fastest plan of a `Chain`, by the planner's rules: nothing is lowered."""
    return compile_remat.plan(Chain(), X, memory_budget="max", compiler="eager").peak_bytes


def train(budget: object, model: nn.Module | None = None) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model = model or Chain()
    call = torch.compile(model, backend=remat, options={"memory_budget": budget})

    def step() -> None:
        output = call(X)
        output.backward(torch.ones_like(output))  # the output lives as long as the step
        for parameter in model.parameters():
            parameter.grad = None

    return model, step


def measured_bytes(step: Callable[[], None]) -> int:
    step()
    gc.collect()
    return peak_bytes(step, "cpu").peak_bytes


@pytest.mark.usefixtures("empty_kernels")
def test_an_output_that_the_backward_reads_and_its_gradient_fit_as_well() -> None:
    """The loss's gradient is a tensor of the output's size, made while the backward still needs the output."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())])
    call = torch.compile(model, backend=remat, options={"memory_budget": 0.9})

    def step() -> None:
        model.zero_grad(set_to_none=True)
        call(X).mean().backward()  # nobody else holds the output

    measured = measured_bytes(step)
    (report,) = compile_remat.reports()
    assert report.budget_bytes is not None and report.predicted_peak_bytes is not None
    assert measured <= report.budget_bytes
    assert abs(report.predicted_peak_bytes - measured) <= X.nbytes


@pytest.mark.full
@pytest.mark.usefixtures("empty_kernels")
def test_without_a_limit_the_code_is_run_dry_and_without_inductor_there_is_none() -> None:
    train("max")[1]()
    torch.compiler.reset()
    model = torch.compile(Chain(), backend=remat, options={"memory_budget": "min", "compiler": "eager"})
    model(X).sum().backward()
    unlimited, eager = compile_remat.reports()
    assert unlimited.scheduled_peak_bytes is not None and eager.scheduled_peak_bytes is None
    assert unlimited.predicted_peak_bytes == unlimited.scheduled_peak_bytes


def _inflate(monkeypatch: pytest.MonkeyPatch, factor: float, *, is_explained: bool = True) -> list[int]:
    """Makes dry runs report `factor` times the live bytes.

    Args:
        is_explained: True if the facts name the kernels that need more.

    Returns:
        A list that gets the peak of each later dry run: of each plan's lowered graphs, then of the accepted plan's code.
    """
    seen: list[int] = []

    def larger(graph: GraphFacts | None) -> GraphFacts | None:
        if graph is None or not is_explained:
            return graph
        kernels = tuple(replace(kernel, live_bytes=int(kernel.live_bytes * factor)) for kernel in graph.kernels)
        return replace(graph, kernels=kernels)

    def inflated(forward: Emitted, backward: Emitted) -> RegionRun:
        run = run_region(forward, backward)
        seen.append(int(run.live_bytes * factor))
        return replace(run, live_bytes=seen[-1], forward=larger(run.forward), backward=larger(run.backward))

    monkeypatch.setattr(feedback, "run_region", inflated)
    return seen


def _count_readings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that grows by one entry for each graph that is read before its code."""
    count, read = list[bool](), reading.read
    monkeypatch.setattr(reading, "read", lambda graph: (count.append(True), read(graph))[1])
    return count


@pytest.mark.proof
@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    "is_explained",
    [pytest.param(True, id="on facts"), pytest.param(False, id="for fewer bytes", marks=pytest.mark.full)],
)
def test_where_the_code_needs_more_it_is_planned_again(
    monkeypatch: pytest.MonkeyPatch, fastest_bytes: int, *, is_explained: bool
) -> None:
    """Planning again comes before any code is made: the plan whose code is emitted is the one that fits."""
    budget_bytes = int(fastest_bytes * 0.8)
    seen = _inflate(monkeypatch, 1.15, is_explained=is_explained)
    _, step = train(budget_bytes)
    step()
    (report,) = compile_remat.reports()
    *refused, observed, code = seen
    assert refused and min(refused) > budget_bytes >= observed == code
    assert report.scheduled_peak_bytes == code and report.rounds == len(refused) + 1
    assert report.observed_peak_bytes == report.predicted_peak_bytes == observed
    assert report.plan is not None and report.budget_bytes == budget_bytes == report.plan.budget_bytes
    assert is_explained or report.plan.peak_bytes <= budget_bytes / 1.15 * 1.01
    assert ("planned for" in report.message) == (not is_explained)


class Checkpointed(nn.Module):
    """Layers inside of ``torch.utils.checkpoint``, whose tags a low budget sets aside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.sin(layer(y)).exp(), x, use_reentrant=False)
        return x


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("budget", [0.6, 0.4])
def test_checkpoints_that_are_set_aside_are_no_error_below_the_floor(budget: float) -> None:
    torch.manual_seed(0)
    call = torch.compile(Checkpointed(), backend=remat, options={"memory_budget": budget})
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        warnings.filterwarnings("ignore", rf"compile_remat: memory_budget = {budget} allows", PlannerWarning)
        call(torch.randn(16, 8, requires_grad=True)).sum().backward()
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.observed_peak_bytes is not None and report.budget_bytes is not None
    if report.observed_peak_bytes > report.budget_bytes:  # said once, with the floor of the code that runs
        assert report.message.count("the graph runs with its lowest plan") == 1
        *_, lowest = in_one_unit(report.budget_bytes, report.observed_peak_bytes)
        assert f"lowest reachable peak ({lowest})" in report.message
        assert "own activation checkpoints" in report.message and "gradient_checkpointing=False" in report.message


@pytest.mark.usefixtures("empty_kernels")
def test_a_refusal_holds_where_torch_suppresses_errors_of_a_backward(
    monkeypatch: pytest.MonkeyPatch, fastest_bytes: int
) -> None:
    """For varying sizes torch compiles the backward early and suppresses its errors: the refused plan ran, above its budget.

    Torch logs such an error with its traceback, which a refused plan is none of.
    """
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("torch._functorch._aot_autograd.graph_compile"), "handlers", [handler])
    seen = _inflate(monkeypatch, 1.15)
    model = Chain()
    call = torch.compile(
        lambda x: model(x) * x.shape[0],
        backend=remat,
        dynamic=True,
        options={"memory_budget": int(fastest_bytes * 0.8)},
    )
    call(X).sum().backward()
    (report,) = compile_remat.reports()
    assert report.rounds > 1 and report.observed_peak_bytes is not None and report.budget_bytes is not None
    assert seen[0] > report.budget_bytes >= report.observed_peak_bytes
    assert not [record.getMessage() for record in logged if "eagerly compile backwards" in record.getMessage()]


def test_only_the_last_compilation_is_built_and_gives_the_gradients(
    monkeypatch: pytest.MonkeyPatch, fastest_bytes: int
) -> None:
    built, emitted = Built(monkeypatch), list[str]()
    take_in = Emissions.__call__

    def note(emissions: Emissions, graph: Emitted) -> None:
        if not graph.nodes_of:  # code, which was not only read
            emitted.append(graph.source_code)
        take_in(emissions, graph)

    monkeypatch.setattr(Emissions, "__call__", note)
    torch.manual_seed(0)
    model = Chain()
    model(X).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    seen = _inflate(monkeypatch, 1.15)
    output = torch.compile(model, backend=remat, options={"memory_budget": int(fastest_bytes * 0.8)})(X)
    kept = output.detach().clone()
    output.sum().backward()
    assert len(seen) >= 3 and len(emitted) == 2, "a plan that is refused has no code"
    kernels = [kernel for unit in built.units for kernel in unit]
    assert kernels and all(kernel.source.strip() in "".join(emitted) for kernel in kernels)
    assert len(built.units) <= 2, "the kernels of a graph are built together"
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output, kept)  # no backward of another compilation writes into it


@pytest.mark.full
@pytest.mark.usefixtures("empty_kernels")
def test_graphs_that_cannot_be_read_are_planned_again_on_their_code(
    monkeypatch: pytest.MonkeyPatch, fastest_bytes: int
) -> None:
    """An operator for which Inductor's code generators raise, for example: training goes on, and the budget holds."""

    def fail(graph: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(reading, "read", fail)
    budget_bytes = int(fastest_bytes * 0.8)
    seen = _inflate(monkeypatch, 1.15)
    _, step = train(budget_bytes)
    step()
    (report,) = compile_remat.reports()
    assert len(seen) == 2 and seen[0] > budget_bytes >= seen[1] == report.scheduled_peak_bytes
    assert report.observed_peak_bytes is None and "planned for" in report.message


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("retain_graph", [False, True])
def test_the_backward_is_compiled_once_and_fits_the_first_backward(
    monkeypatch: pytest.MonkeyPatch, *, retain_graph: bool
) -> None:
    """As with plain torch: a backward that runs again must not overwrite saved tensors."""
    compiled, original = [], entry.inductor.compile_fx_inner
    monkeypatch.setattr(entry.inductor, "compile_fx_inner", lambda *a, **k: (compiled.append(k), original(*a, **k))[1])
    model = Chain()
    loss = torch.compile(model, backend=remat, options={"memory_budget": "min"})(X).sum()
    assert [bool(k.get("is_backward")) for k in compiled] == [False, True]
    loss.backward(retain_graph=retain_graph)
    assert len(compiled) == 2 + retain_graph
    assert compile_remat.reports()[0].scheduled_peak_bytes is not None


@pytest.mark.usefixtures("empty_kernels")
def test_below_the_lowest_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = compile_remat.plan(Chain(), X, memory_budget="min", compiler="eager").peak_bytes
    seen = _inflate(monkeypatch, 1.5)
    with pytest.raises(BudgetError) as caught:
        train(f"{int(lowest * 1.05)} B")[1]()
    assert caught.value.floor_bytes == min(seen) > int(lowest * 1.05)
    assert compile_remat.reports() == []


@pytest.mark.usefixtures("empty_kernels")
def test_what_torch_asks_for_may_be_missed_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _inflate(monkeypatch, 3)
    _, step = train(None)
    with (
        torch._functorch.config.patch(activation_memory_budget=0.5),
        pytest.warns(PlannerWarning, match="Inductor's code needs"),
    ):
        step()
    assert "above the budget" in compile_remat.reports()[0].message


@pytest.mark.full
@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("is_explained", [True, False], ids=["on facts", "for fewer bytes"])
def test_a_second_process_enters_with_the_plan_that_was_found(
    monkeypatch: pytest.MonkeyPatch, fastest_bytes: int, *, is_explained: bool
) -> None:
    """The caches on disk are what the second process finds; here both run in one."""
    budget_bytes = int(fastest_bytes * 0.8)
    seen = _inflate(monkeypatch, 1.15, is_explained=is_explained)
    train(budget_bytes)[1]()
    (first,) = compile_remat.reports()
    dry_runs, planned = len(seen), []
    assert first.rounds > 1
    split = partitioner.split
    monkeypatch.setattr(partitioner, "split", lambda *a, **k: (planned.append(True), split(*a, **k))[1])
    read = _count_readings(monkeypatch)
    torch.compiler.reset()
    compile_remat.reset_reports()
    train(budget_bytes)[1]()
    (second,) = compile_remat.reports()
    assert second.from_cache and (len(seen), planned, read) == (dry_runs, [], [])
    assert replace(second, from_cache=False, region=first.region) == first


@pytest.mark.usefixtures("empty_kernels")
def test_a_pinned_plan_stays(monkeypatch: pytest.MonkeyPatch, fastest_bytes: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"plan_dir": str(tmp_path / "plans"), "memory_budget": int(fastest_bytes * 0.8)}
    for factor in (1.0, 1.3):
        torch.compiler.reset()
        seen = _inflate(monkeypatch, factor)
        torch.manual_seed(0)
        call = torch.compile(Chain(), backend=remat, options=options)
        if factor > 1:
            with pytest.warns(PlannerWarning, match="Inductor's code needs"):
                call(X).sum().backward()
        else:
            call(X).sum().backward()
        assert len(seen) == 2, "once as it is lowered, once as it is emitted"


def test_graphs_that_do_not_fit_together_have_no_scheduled_peak() -> None:
    collected = Emissions()
    assert collected.region_run() is None
    collected(forward_returning("b"))
    collected(emitted(BACKWARD, NAMES, 1, backward=True))
    assert collected.region_run() is None


def test_what_auto_found_has_to_hold_the_allocators_segments() -> None:
    """A budget in bytes limits the region peak; `auto` requires that the process fits into the device."""
    plan = replace(compile_remat.plan(Chain(4), X, memory_budget="max", compiler="eager"), budget_bytes=10 * KIB)
    report = Report("key", "auto", 10 * KIB, plan, scheduled_peak_bytes=9 * KIB, required_peak_bytes=12 * KIB)
    bytes_left = {}
    for from_auto in (False, True):
        settings = Settings(MemoryBudget("bytes", 10 * KIB), load_device("cpu"), from_auto=from_auto)
        bytes_left[from_auto] = feedback.bytes_to_plan_for([report], settings, FitBelow(10 * KIB))
    assert bytes_left == {False: None, True: 8 * KIB}
