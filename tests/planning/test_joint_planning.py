"""`partition` as a partition_fn of AOTAutograd, and the graphs that are easy to get wrong."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat import partition
from compile_remat.backend import remat
from compile_remat.errors import BudgetError, ConfigError, DeviceError, PlannerWarning
from compile_remat.passes.problem.duplication import original
from compile_remat.planning import searches

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings, graphs, reports or cached plans from elsewhere: on a cache hit nothing of ours would run."""
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    torch.compiler.reset()
    compile_remat.reset_reports()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


class Traced:
    """A function under aot_function, with the two graphs that ran."""

    def __init__(self, function: Callable[..., torch.Tensor], **settings: Any) -> None:
        self.graphs: dict[str, fx.GraphModule] = {}
        self.call = aot_function(
            function,
            fw_compiler=functools.partial(self._keep, "forward"),
            bw_compiler=functools.partial(self._keep, "backward"),
            partition_fn=functools.partial(partition, **settings),
        )

    def _keep(self, name: str, graph: fx.GraphModule, inputs: Any) -> Any:
        self.graphs[name] = graph
        return make_boxed_func(graph.forward)

    def targets(self, name: str) -> list[str]:
        return [str(node.target) for node in self.graphs[name].graph.nodes if node.op == "call_function"]


LAYERS = 12
SHAPES = [(256, 16), *[(16, 16)] * LAYERS]


def chain(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.sin(x @ weight)
    return x


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output.sum(), inputs)]


@pytest.mark.parametrize("budget", ["max", 1.0, 0.6, 0.4, "min", "1MiB", 1 << 20, "auto"])
def test_gradients_equal_eager_and_the_budget_holds(budget: object) -> None:
    inputs = tensors(*SHAPES)
    traced = Traced(chain, memory_budget=budget)
    torch.testing.assert_close(gradients(traced.call, inputs), gradients(chain, inputs))
    (report,) = compile_remat.reports()
    assert report.plan.is_feasible
    if report.budget_bytes is not None:
        assert report.predicted_peak_bytes <= report.budget_bytes
    _assert_graphs_follow_the_plan(traced, report)


def _assert_graphs_follow_the_plan(traced: Traced, report: compile_remat.Report) -> None:
    """The forward hands over what the plan saves (and inputs), and the backward computes what it recomputes."""
    forward, backward = (traced.graphs[name].graph for name in ("forward", "backward"))
    inputs = {node.name for node in forward.nodes if node.op == "placeholder"}
    handed = {node.name for node in backward.nodes if node.op == "placeholder"} - inputs
    handed = {name for name in handed if not name.startswith("tangents")}
    roots = {_root(node).name for node in forward.nodes if node.name in handed} - inputs
    assert roots == set(report.plan.saved)
    computed = {original(node.name, report.plan.again) for node in backward.nodes if node.op == "call_function"}
    assert set(report.plan.recomputed) <= computed
    assert not computed & set(report.plan.saved)


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.target in (torch.ops.aten.t.default, torch.ops.aten.permute.default):
        node = node.all_input_nodes[0]
    return node


def test_less_budget_recomputes_more() -> None:
    counts = []
    for budget in ("max", 0.6, "min"):
        traced = Traced(chain, memory_budget=budget)
        gradients(traced.call, tensors(*SHAPES))
        counts.append(traced.targets("backward").count("aten.mm.default"))
    assert 2 * LAYERS == counts[0] <= counts[1] <= counts[2] < 3 * LAYERS
    assert counts[0] < counts[2]


def test_the_same_budget_gives_the_same_plan() -> None:
    for _ in range(2):
        gradients(Traced(chain, memory_budget=0.5).call, tensors(*SHAPES))
    first, second = compile_remat.reports()
    assert first.plan == second.plan


def test_below_the_floor_is_an_error_with_the_floor() -> None:
    with pytest.raises(BudgetError) as caught:
        gradients(Traced(chain, memory_budget="1KiB").call, tensors(*SHAPES))
    error = caught.value
    assert error.budget_bytes < error.floor_bytes
    assert len(error.largest) == 5
    assert compile_remat.reports() == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"memory_budget": "8 gigs"}, ConfigError),
        ({"memory_budget": 8}, ConfigError),
        ({"device": "h1000"}, DeviceError),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        gradients(Traced(chain, **settings).call, tensors(*SHAPES))


def test_the_device_and_the_cost_model_can_be_chosen() -> None:
    for settings in ({"device": "h200"}, {"device": "cpu"}, {"cost_model": "unit"}):
        gradients(Traced(chain, memory_budget="min", **settings).call, tensors(*SHAPES))
    times = [report.step_time_ns for report in compile_remat.reports()]
    assert len(set(times)) == 3


def test_a_broken_planner_warns_and_gradients_stay_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **keywords: Any) -> Any:
        raise IndexError("the planner broke")

    monkeypatch.setattr(searches, "Planner", broken)
    inputs = tensors(*SHAPES)
    with pytest.warns(PlannerWarning, match="the planner broke"):
        actual = gradients(Traced(chain, memory_budget="min").call, inputs)
    torch.testing.assert_close(actual, gradients(chain, inputs))


# -- graphs that are easy to get wrong --------------------------------------------------------------------------------


def reads_then_mutates(x: torch.Tensor, w: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Plain torch.compile recomputes `buffer.exp()` from the mutated buffer: its gradients are silently wrong."""
    y = ((x @ w) * buffer.exp()).sin()
    buffer.mul_(2.0)
    return y


def mutating_step(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    inputs, buffer = tensors((4, 8), (8, 8)), torch.full((8,), 0.3, dtype=torch.float64)
    output = function(*inputs, buffer)
    return [output.detach(), *torch.autograd.grad(output.sum(), inputs), buffer]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("budget", ["max", "min"])
def test_readers_of_a_mutated_buffer_are_saved(budget: str, compiler: str) -> None:
    options = {"memory_budget": budget, "compiler": compiler}
    actual = mutating_step(torch.compile(reads_then_mutates, backend=remat, options=options))
    torch.testing.assert_close(actual, mutating_step(reads_then_mutates))


def test_readers_of_a_mutated_buffer_are_saved_when_the_planner_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise IndexError("the planner broke")

    monkeypatch.setattr(searches, "Planner", broken)
    call = torch.compile(reads_then_mutates, backend=remat, options={"compiler": "eager"})
    with pytest.warns(PlannerWarning):
        actual = mutating_step(call)
    torch.testing.assert_close(actual, mutating_step(reads_then_mutates))


def region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.cos(x @ weight) @ weight)


def with_region(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = checkpoint(region, torch.sin(x), weight, use_reentrant=False)
    return torch.sin(x @ weight)


def test_a_users_checkpoint_region_is_recomputed_at_max() -> None:
    inputs = tensors((256, 16), (16, 16))
    call = torch.compile(with_region, backend=remat, options={"memory_budget": "max", "compiler": "eager"})
    torch.testing.assert_close(gradients(call, inputs), gradients(with_region, inputs))
    (report,) = compile_remat.reports()
    assert any(name.startswith("cos") for name in report.plan.recomputed)
    torch.compiler.reset()
    free = torch.compile(
        lambda x, w: torch.sin(region(torch.sin(x), w) @ w),
        backend=remat,
        options={"memory_budget": "max", "compiler": "eager"},
    )
    gradients(free, inputs)
    plan, free_plan = report.plan, compile_remat.reports()[-1].plan
    assert plan.saved_bytes < free_plan.saved_bytes


@pytest.mark.parametrize("budget", [0.8, "min"])
def test_a_users_checkpoint_region_works_within_a_budget(budget: object) -> None:
    inputs = tensors((256, 16), (16, 16))
    call = torch.compile(with_region, backend=remat, options={"memory_budget": budget, "compiler": "eager"})
    torch.testing.assert_close(gradients(call, inputs), gradients(with_region, inputs))


def test_a_checkpointed_dropout_replays_its_mask() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.sin(x), 0.5) * x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(dropped, x, use_reentrant=False)

    (x,) = tensors((64, 16))
    call = torch.compile(whole, backend=remat, options={"memory_budget": "min", "compiler": "eager"})
    output = call(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    scale = torch.where(output.detach() != 0, 2.0, 0.0)
    torch.testing.assert_close(gradient, scale * (torch.cos(x) * x + torch.sin(x)).detach())


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_dynamic_shapes_take_one_compilation(compiler: str) -> None:
    options = {"memory_budget": "min", "compiler": compiler}
    call = torch.compile(chain, backend=remat, options=options, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for batch in (64, 48, 80):
        inputs = tensors((batch, 16), *[(16, 16)] * 3)
        torch.testing.assert_close(gradients(call, inputs), gradients(chain, inputs))
    assert len(compile_remat.reports()) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compile_remat.reports()[0].num_recomputed > 0


def test_sizes_that_are_computed_with_are_handed_over() -> None:
    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight).view(-1) * (x.shape[0] + 1)

    call = torch.compile(scaled, backend=remat, options={"memory_budget": "min", "compiler": "eager"}, dynamic=True)
    for batch in (6, 9):
        inputs = tensors((batch, 16), (16, 16))
        torch.testing.assert_close(gradients(call, inputs), gradients(scaled, inputs))
    assert len(compile_remat.reports()) == 1
