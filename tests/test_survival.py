"""A training run survives graphs, folders, files and threads that nobody planned for."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import compiled_function
from torch import Tensor, nn

import compile_remat
from compile_remat._torch.ambient import compile_lock
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.backend import remat
from compile_remat.compilation.caveats import UNFUSED
from compile_remat.compilation.driver import Compilation
from compile_remat.errors import ConfigError, PlannerWarning
from compile_remat.inductor.unplanned_graphs import OPTIONS, unmodelled_options
from tests.correctness.harness import RUNS_UNFUSED
from tests.threads import run_at_once


@pytest.fixture(autouse=True)
def _fresh(own_caches: object) -> Iterator[None]:
    """No plan fails silently: torch's own choice of saved tensors comes with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        warnings.filterwarnings("ignore", RUNS_UNFUSED, PlannerWarning)
        yield


def compiled(function: Callable[..., Any], budget: object = "min", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=remat, options={"memory_budget": budget, "compiler": "eager", **options})


# -- graphs -----------------------------------------------------------------------------------------------------------


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.view(2, 3)


@pytest.mark.parametrize("budget", ["min", "max"])
@pytest.mark.parametrize("function", [lambda x: (_Flat.apply(x),), lambda x: x.unbind(0)], ids=["view", "unbind"])
def test_a_graph_with_nothing_to_save(function: Callable[[Tensor], tuple[Tensor, ...]], budget: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    torch.stack([y.sum() for y in compiled(function, budget)(x)]).sum().backward()
    assert x.grad is not None and x.grad.eq(1).all()
    (report,) = compile_remat.reports()
    assert report.status != "FALLBACK" and report.plan is not None and report.plan.saved == ()


@pytest.mark.parametrize("budget", ["min", "max"])
def test_jagged_nested_tensors(budget: object) -> None:
    """A jagged dimension has a symbol for its size that is no number."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    rows = [torch.linspace(-1, 1, 16 * length).reshape(length, 16) for length in (3, 5)]

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        model.zero_grad()
        torch.nested.to_padded_tensor(call(x), 0.0).square().sum().backward()
        assert model[0].weight.grad is not None
        return model[0].weight.grad

    expected = gradient(model)
    torch.testing.assert_close(gradient(compiled(model, budget)), expected)
    (report,) = compile_remat.reports()
    assert report.status != "FALLBACK"


class _WritesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x + 1
        torch._foreach_mul_([y], [3])
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return g * y


def test_partition_refuses_a_graph_that_writes_in_place() -> None:
    """Recomputed from before the write, `y` would give a gradient of 2 in place of 6."""
    x = torch.ones(3, 3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return _WritesInPlace.apply(x)  # type: ignore[no-untyped-call, no-any-return]

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        return graph

    split = functools.partial(compile_remat.partition, memory_budget="min")
    call = compiled_function(function, keep, keep, dynamic=False, partition_fn=split, disable_functionalization=True)
    with pytest.raises(ConfigError, match=r"not functional.*_foreach_mul_"):
        call(x)
    functional = compiled_function(function, keep, keep, dynamic=False, partition_fn=split)
    functional(x).sum().backward()
    assert x.grad is not None and x.grad.eq(6).all()


# -- threads ----------------------------------------------------------------------------------------------------------


def test_a_plan_is_compiled_again_as_dynamo_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its lock, and with the flag by which the calls of other threads know that nobody traces them with FX."""
    run, seen = Compilation.run, list[tuple[bool, bool]]()

    def noted(*args: Any, **options: Any) -> Any:
        seen.append((compile_lock._is_owned(), torch.compiler.is_compiling()))
        return run(*args, **options)

    monkeypatch.setattr(Compilation, "run", noted)
    model, x = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(8, 8), nn.Tanh()))), torch.ones(256, 8)
    call = compiled(model, "1MiB")
    for _ in range(3):  # the second step knows that the graph runs twice
        (call(x) + call(x)).sum().backward()
    is_told = hasattr(torch.compiler, "_compile_session_context")
    assert seen[:2] == [(True, is_told)] * 2


@pytest.mark.parametrize("budget", ["min", 0.8])
def test_three_threads_under_one_budget(budget: object) -> None:
    """Each compiles and trains a model, and their steps overlap."""
    torch.manual_seed(0)
    models = [nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(8, 8), nn.Tanh()))) for _ in range(3)]
    inputs = [torch.randn(256, 8) for _ in models]
    together = threading.Barrier(len(models), timeout=300)

    def gradients(
        model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, wait: Callable[[], object] = lambda: None
    ) -> list[Tensor]:
        model.zero_grad()
        loss = call(x).square().mean()
        wait()
        loss.backward()
        wait()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = [gradients(m, m, x) for m, x in zip(models, inputs, strict=True)]
    seen: dict[int, list[Tensor]] = {}

    def train(k: int) -> None:
        call = compiled(models[k], budget)
        for wait in (together.wait, together.wait, lambda: None):
            seen[k] = gradients(models[k], call, inputs[k], wait)

    with pytest.warns(PlannerWarning, match="several threads"):
        run_at_once(*(functools.partial(train, k) for k in range(len(models))))
    torch.testing.assert_close([seen[k] for k in range(len(models))], expected)
    assert {report.status for report in compile_remat.reports()}.isdisjoint({"FALLBACK"})


# -- backwards that keep their graph ----------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_the_first_backward_may_keep_its_graph(check: bool) -> None:
    """Torch lets the first backward of a graph decide; what `check` runs before it does not count."""
    model, x = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh()))), torch.ones(64, 8)
    model(x).sum().backward()
    expected = [2 * p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss = compiled(model, check=check)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-5, atol=1e-5)
    assert compile_remat.reports()[-1].check == "passed" * check


# -- where the budget does not hold -----------------------------------------------------------------------------------


def _gradients_inside(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.sin().exp().cos().square().sum())(x)


def test_gradients_inside_of_a_graph_without_a_plan_are_a_warning_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_remat.partitioning.inner_planning.as_joint", lambda *args: None)
    x = torch.ones(512, 512)
    with pytest.warns(PlannerWarning, match=r"memory_budget = 1MiB does not hold .*torch\.func\.grad"):
        torch.testing.assert_close(compiled(_gradients_inside, "1MiB")(x), _gradients_inside(x))
    (report,) = compile_remat.reports()
    assert report.status == "NOT_PLANNED" and "torch.func.grad" in str(report)


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("budget", "fits"), [(1 << 20, False), (8 << 20, True), ("min", True)])
def test_inference_is_a_row_and_where_it_exceeds_the_budget_a_warning(budget: object, fits: bool) -> None:
    """A product cannot be fused with the next one: two buffers of 1 MiB."""
    x, w = torch.ones(512, 512), torch.ones(512, 512)
    expected = contextlib.nullcontext() if fits else pytest.warns(PlannerWarning, match="its code needs 2.0 MiB")
    for first in (True, False):  # the second time from torch's cache
        with torch.no_grad(), expected:
            compiled(lambda x: x @ w @ w, budget, compiler="inductor")(x)
        forget_warnings()
        report = compile_remat.reports()[-1]
        assert (report.status, report.from_cache, report.scheduled_peak_bytes) == ("NOT_PLANNED", not first, 2 << 20)
        torch.compiler.reset()


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_no_plan_takes_account_of(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    value: object = {"activation_quantization_aten_pass": {}} if name == "post_grad_fusion_options" else True
    value = 1 if name == "triton.multi_kernel" else value
    if name == "cpp_wrapper":  # its code cannot run without kernels
        assert unmodelled_options({name: value})
        return
    with pytest.warns(PlannerWarning, match=f"memory_budget may not hold, because {name} is on"):
        compiled(model, "min", compiler="inductor", **{name: value})(torch.ones(64, 8))
    (report,) = compile_remat.reports()
    assert report.status == "NOT_MODELLED" and name in report.caveat


class AroundLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).sin()
        x, _ = self.lstm(x)
        return x


@torch.compiler.disable
def _outside(x: Tensor) -> Tensor:
    return x.exp().sin()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (AroundLSTM(), r"line \d+ of .*test_survival\.py \(x, _ = self\.lstm\(x\)\): TORCH_LOGS"),
        (lambda x: _outside(x.sin()).cos(), "compiler.disable"),
    ],
)
def test_code_that_is_not_compiled_is_a_warning_and_a_status(function: Callable[..., Tensor], said: str) -> None:
    x = torch.ones(4, 8, requires_grad=True)
    with pytest.warns(PlannerWarning, match=f"memory_budget may not hold, because .*{said}"):
        call = compiled(function, "8MiB")(x)
    call.sum().backward()
    report = compile_remat.reports()[0]
    assert report.status == "NOT_MODELLED" and "not modelled: " in str(report)


def test_other_graph_breaks_are_none(recwarn: pytest.WarningsRecorder) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.exp().sum()

    compiled(function, "8MiB")(torch.ones(8, requires_grad=True)).backward()
    said = [w for w in recwarn if issubclass(w.category, PlannerWarning)]
    assert not [w for w in said if not re.match(RUNS_UNFUSED, str(w.message))]
    assert {report.caveat for report in compile_remat.reports()} == {UNFUSED}


def test_the_manual_names_these_options() -> None:
    manual = (Path(__file__).parent.parent / "docs/reference/budgets.md").read_text()
    assert all(f"| `{name}`" in manual for name in OPTIONS)
