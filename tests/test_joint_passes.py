"""The setting `joint_passes`: passes of the user in the backend, their checks, and their identity in caches and pinned plans."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import CheckError, PassError, PlannerWarning

aten = torch.ops.aten


class Squares:
    """`pow(x, 2)` becomes `x * x`, or `x * x * factor`."""

    def __init__(self, identity: object = None, factor: float = 1) -> None:
        self.identity, self.factor = identity, factor
        self.counts: list[int] = []

    def __call__(self, graph: fx.Graph) -> None:
        found = [n for n in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar) if n.args[1] == 2]
        for node in found:
            with graph.inserting_before(node):
                made = graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
                made.meta = dict(node.meta)
                if self.factor != 1:
                    made = graph.call_function(aten.mul.Tensor, (made, self.factor))
                    made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
        self.counts.append(len(found))

    def uuid(self) -> object:
        return self.identity


class Rows:
    """`x.pow(2)` becomes `x * x.view(rows, width)`, whose sizes may be symbols."""

    def __call__(self, graph: fx.Graph) -> None:
        found = graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
        for node in [node for node in found if node.args[1] == 2]:
            x = node.args[0]
            rows = graph.find_nodes(op="placeholder")[0]
            with graph.inserting_before(node):
                width = node.meta["val"].shape[1]
                view = graph.call_function(aten.view.default, (x, [rows, width]))
                made = graph.call_function(aten.mul.Tensor, (x, view))
            view.meta, made.meta = dict(node.meta), dict(node.meta)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x).pow(2)


def chain(layers: int = 6) -> nn.Module:
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(8, 8), Square())])


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, own_caches: Path) -> Iterator[None]:
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    compile_remat.reset_reports()
    yield
    compile_remat.reset_reports()


def step(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients of one step on copies; in eager mode without options."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.compiler.reset()
    call: Callable[[Tensor], Tensor] = torch.compile(model, backend=remat, options=options) if options else model
    output = call(x)
    output.square().sum().backward()
    return [output.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


def recompiled(options: dict[str, Any], times: int) -> list[bool]:
    """Compile a step several times, and return for each time whether it came from torch's cache."""
    model, x, found = chain(2), torch.randn(64, 8), list[bool]()
    for _ in range(times):
        compile_remat.reset_reports()
        step(model, x, memory_budget="min", **options)
        found += [report.from_cache for report in compile_remat.reports()]
    return found


@pytest.mark.parametrize(
    ("compiler", "memory_budget"),
    [("eager", "max"), ("eager", "min"), pytest.param("inductor", "min", marks=pytest.mark.proof)],
)
def test_a_pass_runs_and_gradients_are_those_of_eager_mode(compiler: str, memory_budget: str) -> None:
    model, x, squares = chain(), torch.randn(256, 8), Squares("an identity")
    actual = step(model, x, memory_budget=memory_budget, compiler=compiler, joint_passes=[squares])
    assert squares.counts and set(squares.counts) == {6}
    torch.testing.assert_close(actual, step(model, x))
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.status != "FALLBACK"
    assert any(name.startswith("mul_tensor") for name in (*report.plan.saved, *report.plan.recomputed))


def test_several_passes_run_in_their_order() -> None:
    order = list[str]()
    passes = [lambda graph: order.append("first"), lambda graph: order.append("second")]
    step(chain(2), torch.randn(64, 8), memory_budget="max", compiler="eager", joint_passes=passes)
    assert order[:2] == ["first", "second"] and len(order) % 2 == 0


def test_a_graph_with_its_backward_inside_is_rewritten_too() -> None:
    layer = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.sin(layer(x)).pow(2)
        return x.sum()

    x, squares = torch.randn(256, 8), Squares("an identity")
    options = {"memory_budget": "min", "compiler": "eager", "joint_passes": squares}
    with torch.no_grad():
        actual = torch.compile(torch.func.grad(loss), backend=remat, options=options)(x)
    assert squares.counts and max(squares.counts) > 0
    torch.testing.assert_close(actual, torch.func.grad(loss)(x))


def test_the_check_of_values_adds_no_guard() -> None:
    """A graph whose number of rows is a symbol serves all sizes; the pass reads the symbol."""

    def loss(x: Tensor) -> Tensor:
        return torch.sin(x).pow(2).sum()

    torch.compiler.reset()
    counters.clear()
    options = {"memory_budget": "min", "compiler": "eager", "joint_passes": (Rows(),)}
    compiled = torch.compile(loss, backend=remat, options=options)
    for rows in (64, 96, 128):
        x = torch.randn(rows, 8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(loss(x), x))
    assert counters["stats"]["unique_graphs"] == 1


def half_as_large(graph: fx.Graph) -> None:
    output = graph.output_node()
    first, *others = output.args[0]  # type: ignore[misc]
    with graph.inserting_before(output):
        part = graph.call_function(aten.slice.Tensor, (first, 0, 0, 2))
    part.meta = {**first.meta, "val": first.meta["val"][:2]}
    output.args = ((part, *others), *output.args[1:])


def test_a_pass_that_changes_the_shape_of_an_output_is_an_error() -> None:
    with pytest.raises(PassError, match=r"the pass half_as_large changed output 0 from float32\[64, 8\]"):
        step(chain(2), torch.randn(64, 8), memory_budget="max", compiler="eager", joint_passes=(half_as_large,))


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "passed"), (1.5, "failed: ")])
def test_check_compares_with_the_graph_without_passes(factor: float, outcome: str) -> None:
    squares = Squares("an identity", factor)
    options = {"memory_budget": "min", "compiler": "eager", "check": "1", "joint_passes": (squares,)}
    if factor == 1:
        step(chain(2), torch.randn(64, 8), **options)
    else:
        with pytest.raises(CheckError):
            step(chain(2), torch.randn(64, 8), **options)
    (report,) = compile_remat.reports()
    assert report.check is not None and report.check.startswith(outcome)


# -- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_kernels")
def test_another_identity_misses_torchs_caches() -> None:
    assert recompiled({"joint_passes": (Squares("a"),)}, 2) == [False, True]
    assert recompiled({"joint_passes": (Squares("b"),)}, 2) == [False, True]
    assert recompiled({"joint_passes": (Squares("a"),)}, 1) == [True]
    assert recompiled({}, 1) == [False]


@pytest.mark.usefixtures("empty_kernels")
def test_without_an_identity_no_cache_is_used_and_one_warning_says_so(tmp_path: Path) -> None:
    counters.clear()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        found = recompiled({"joint_passes": (Squares(), Squares("a")), "plan_dir": str(tmp_path / "plans")}, 3)
    assert found == [False] * 3
    said = [str(w.message) for w in noted if issubclass(w.category, PlannerWarning)]
    text = "joint_passes: Squares has no uuid(), so graphs are compiled without torch's caches and without plan_dir; "
    text += "define uuid() to have them"
    assert said == [f"compile_remat: {text}"]
    assert counters["inductor"]["fxgraph_cache_hit"] == counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["aot_autograd"]["autograd_cache_saved"] == 0
    assert not (tmp_path / "plans").exists()


def test_pinned_plans_of_another_identity_are_not_replayed(tmp_path: Path) -> None:
    def status(*passes: object) -> str:
        compile_remat.reset_reports()
        options = {
            "memory_budget": "min",
            "compiler": "eager",
            "plan_dir": str(tmp_path),
            "joint_passes": passes or None,
        }
        step(chain(2), torch.randn(64, 8), **options)
        (report,) = compile_remat.reports()
        assert report.plan is not None
        return report.plan.status.name

    given = [(), (Squares("a"),), (Squares("b"),), (Squares("a"), Squares("b"))]
    assert "REPLAYED" not in [status(*passes) for passes in given]
    assert [status(*passes) for passes in given] == ["REPLAYED"] * 4
    assert len(list(tmp_path.glob("*.plan.json"))) == 1
    assert len(list(tmp_path.glob("passes-*/*.plan.json"))) == 3


# -- the other functions ------------------------------------------------------------------------------------------------


def test_explain_shows_the_plan_of_the_graph_with_the_pass() -> None:
    model, x, squares = chain(2), torch.randn(64, 8), Squares("a")
    report = compile_remat.explain(model, x, memory_budget="min", compiler="eager", joint_passes=squares)
    assert squares.counts and report.plan is not None
    assert any(name.startswith("mul_tensor") for name in (*report.plan.saved, *report.plan.recomputed))
