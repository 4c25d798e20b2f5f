"""Graphs that hold a backward beside their forward: planned, the same numbers, and a lower peak."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import compile_remat
from compile_remat import BudgetError, PlannerWarning, install, uninstall
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import load_device
from compile_remat.device.measure import peak_bytes
from compile_remat.partitioning.inner_planning import with_copies_in_backward
from compile_remat.passes.graph import inner_backward
from compile_remat.passes.graph.inner_backward import as_joint, backward_calls
from compile_remat.planning.request import Fit
from compile_remat.planning.settings import Settings

WIDTH, ROWS, DEPTH = 32, 1024, 6
X, Y = (torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).roll(k) for k in (0, 7))


@pytest.fixture(autouse=True)
def _fresh(own_caches: object, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert not [w for w in recwarn if "planner failed" in str(w.message)]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / 6 for _ in range(DEPTH)]


def loss(ws: list[Tensor], x: Tensor) -> Tensor:
    for w in ws:
        x = torch.sin(torch.tanh(x @ w) * 1.3) + x
    return x.square().mean()


def functional(ws: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    gradients, value = torch.func.grad_and_value(loss)(ws, x)
    return [value, *gradients]


def through_an_inner_step(ws: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """Two backwards, the second one behind another forward."""
    gradients = torch.func.grad(loss)(ws, x)
    return list(torch.func.grad(loss)([w - 0.1 * g for w, g in zip(ws, gradients, strict=True)], y))


def accumulated(ws: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    both = (torch.func.grad(loss)(ws, batch) for batch in (x, y))
    return [a + b for a, b in zip(*both, strict=True)]


def with_an_optimizer(ws: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Inputs are overwritten at the end of the graph."""
    gradients, value = torch.func.grad_and_value(loss)(ws, x)
    for w, g in zip(ws, gradients, strict=True):
        w.sub_(g * 0.1)
    return value


def with_a_sum(ws: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradient that a sum hands on is folded away."""
    return list(torch.func.grad(lambda ws, x: loss(ws, x) + (x @ ws[0]).sin().sum())(ws, x))


def second_derivative(ws: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    return torch.func.grad(lambda x: torch.func.grad(lambda x: loss(ws, x))(x).square().sum())(x)


FUNCTIONS = [functional, through_an_inner_step, accumulated, with_an_optimizer, with_a_sum, second_derivative]


def compiled(function: Callable[..., Any], budget: object, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    compile_remat.reset_reports()
    return torch.compile(function, backend=remat, options={"memory_budget": budget, **options})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_numbers_are_those_of_eager_mode(function: Callable[..., Any]) -> None:
    ws = weights()
    expected = function(ws, X, Y), ws
    for budget in ("min", 0.8):
        ws = weights()
        found = compiled(function, budget, compiler="eager")(ws, X, Y), ws
        torch.testing.assert_close(found, expected)
        (report,) = compile_remat.reports()
        assert report.plan is not None and report.plan.recomputed


def test_autograd_grad_inside() -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("Dynamo breaks the graph here")
    ws = [nn.Parameter(w) for w in weights()]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(ws, x), ws)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.testing.assert_close(compiled(step, "min", compiler="eager")(X), step(X))
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.plan.recomputed


def test_random_numbers_are_drawn_once() -> None:
    def step(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        def dropped(w: Tensor) -> tuple[Tensor, Tensor]:
            y = nn.functional.dropout(torch.tanh(x @ w), 0.5)
            return (y * y.sin()).sum(), y

        gradient, y = torch.func.grad(dropped, has_aux=True)(w)
        return gradient, y

    w = weights()[0]
    gradient, y = compiled(step, "min", compiler="eager")(w, X)
    kept, h = (y != 0) * 2.0, torch.tanh(X @ w)
    expected = X.T @ (kept * (1 - h * h) * ((h * kept).sin() + h * kept * (h * kept).cos()))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("function", [functional, accumulated], ids=lambda f: f.__name__)
def test_the_emitted_code_keeps_the_plan(function: Callable[..., Any]) -> None:
    """The budget holds, and the predicted peak is that of the code, of two backwards as well."""

    def peak(call: Callable[..., Any]) -> int:
        return peak_bytes(lambda: call(weights(), X, Y), "cpu").peak_bytes - weights_bytes

    weights_bytes = DEPTH * WIDTH * WIDTH * 4
    plain = torch.compile(function)
    plain(weights(), X, Y)
    plain_bytes = peak(plain)
    for budget, share in (("min", 0.6), (0.8, 0.82), (int(1.5 * (1 << 20)), 1.0)):
        call = compiled(function, budget)
        call(weights(), X, Y)
        (report,) = compile_remat.reports()
        assert report.plan is not None and report.plan.is_feasible
        assert report.scheduled_peak_bytes is not None
        assert report.scheduled_peak_bytes == pytest.approx(report.plan.peak_bytes, rel=0.01)
        assert report.budget_bytes is None or report.scheduled_peak_bytes <= report.budget_bytes
        assert peak(call) <= 1.01 * report.scheduled_peak_bytes + 64
        assert peak(call) <= share * plain_bytes
        if isinstance(budget, int):
            assert peak(call) <= budget
    again = compiled(function, "min")
    again(weights(), X, Y)
    (report,) = compile_remat.reports()
    assert report.from_cache and report.scheduled_peak_bytes is not None


@pytest.mark.usefixtures("empty_kernels")
def test_bytes_that_the_code_cannot_keep_are_an_error() -> None:
    x = torch.ones(1024, 1024)
    with pytest.raises(BudgetError) as caught:
        compiled(lambda x: torch.func.grad(lambda x: (x @ x).sin().sum())(x), "5MiB")(x)
    assert caught.value.floor_bytes > 5 << 20


def test_through_inductor() -> None:
    expected = functional(weights(), X, Y)
    torch.testing.assert_close(compiled(functional, "min")(weights(), X, Y), expected, rtol=1e-4, atol=1e-6)
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.plan.recomputed


# -- the graph --------------------------------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph that AOTAutograd hands to a compiler for inference."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.append(copy.deepcopy(module))
        return make_boxed_func(module.forward)

    torch.compile(function, backend=aot_autograd(fw_compiler=keep))(*inputs)
    return found[0]


def lines(module: fx.GraphModule) -> list[str]:
    names = [(n.name, str(n.target).split(".")[-2], n.all_input_nodes) for n in module.graph.nodes if n.op[0] == "c"]
    return [f"{name} = {target}({', '.join(n.name for n in reads)})" for name, target, reads in names]


def test_what_is_recomputed_is_a_copy_before_its_first_reader() -> None:
    """Of three layers ``exp(sin(x @ w))``, whose gradients read product and result, the lowest plan computes one product again."""

    def gradient(x: Tensor, w: Tensor) -> Tensor:
        def layers(x: Tensor) -> Tensor:
            for _ in range(3):
                x = torch.exp(torch.sin(x @ w))
            return x.sum()

        return torch.func.grad(layers)(x)

    module = traced(gradient, torch.ones(512, 512), torch.ones(512, 512))
    before = lines(module)
    after = lines(with_copies_in_backward(module, Settings(MemoryBudget("min"), load_device("cpu")), Fit()))
    assert lines(module) == before
    own = [line for line in after if line.split(" ")[0] in ("mul", "cos", "mul_1")]
    assert own == ["mul = mul(expand, exp_2)", "cos = cos(mm_2)", "mul_1 = mul(mul, cos)"]
    assert after[-15:] == [
        "t = t(arg0_1)",
        "mm_3 = mm(mul_1, t)",
        "sin_3 = sin(mm_1)",
        "exp_3 = exp(sin_3)",
        "mul_2 = mul(mm_3, exp_3)",
        "cos_1 = cos(mm_1)",
        "mul_3 = mul(mul_2, cos_1)",
        "mm_4 = mm(mul_3, t)",
        "mm_5 = mm(arg1_1, arg0_1)",
        "sin_4 = sin(mm_5)",
        "exp_4 = exp(sin_4)",
        "mul_4 = mul(mm_4, exp_4)",
        "cos_2 = cos(mm_5)",
        "mul_5 = mul(mul_4, cos_2)",
        "mm_6 = mm(mul_5, t)",
    ]


def test_a_graph_that_writes_in_place_is_left_alone() -> None:
    module = traced(lambda x: torch.func.grad(lambda x: x.sin().sum())(x), torch.ones(4))
    (call,) = backward_calls(module)
    assert as_joint(module, call) is not None
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    with module.graph.inserting_after(node):
        module.graph.call_function(torch.ops.aten.sin_.default, (node,))
    assert as_joint(module, call) is None


# -- under install ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _installed() -> Iterator[None]:
    install(memory_budget="min")
    yield
    uninstall()


@pytest.mark.usefixtures("_installed", "empty_kernels")
@pytest.mark.parametrize("function", [functional, with_an_optimizer], ids=lambda f: f.__name__)
def test_such_graphs_are_planned_under_install(function: Callable[..., Any]) -> None:
    def peak() -> int:
        torch.compiler.reset()
        call = torch.compile(function)
        call(weights(), X, Y)
        return peak_bytes(lambda: call(weights(), X, Y), "cpu").peak_bytes - DEPTH * WIDTH * WIDTH * 4

    low_bytes = peak()
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.plan.recomputed
    uninstall()
    assert low_bytes <= 0.8 * peak()  # fusions are not kept to the plan there
    assert len(compile_remat.reports()) == 1


@pytest.mark.usefixtures("_installed", "empty_kernels")
def test_under_install_a_graph_that_cannot_be_planned_has_a_row_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_backward, "writes_in_place", lambda module: True)
    with pytest.warns(PlannerWarning, match="memory_budget = min does not hold .* computes gradients itself"):
        torch.compile(functional)(weights(), X, Y)
    (report,) = compile_remat.reports()
    assert report.status == "NOT_PLANNED" and "computes gradients itself" in report.caveat


@pytest.mark.usefixtures("_installed")
def test_the_numbers_under_install() -> None:
    torch.compiler.reset()
    expected = functional(weights(), X, Y)
    torch.testing.assert_close(torch.compile(functional)(weights(), X, Y), expected, rtol=1e-4, atol=1e-6)
