"""`GuardedChoices`: Inductor must not fuse what the plan computes at different times into one early kernel."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compile_remat
from benchmarks.common import harness
from benchmarks.models import Case
from compile_remat.backend import compile_graph, remat
from compile_remat.compilation import driver
from compile_remat.config import RematConfig
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor.entry import compile_with_partitioner
from compile_remat.inductor.fusion_guard import GuardedChoices
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes.graph import rewrite_list
from compile_remat.passes.graph.rewrites.addmm import keep_matmuls_in_place
from tests.inductor import joining_models

READERS = 12
MIB = 1 << 20


class Guarded(RematPartitioner):
    """A partitioner that is guarded under any budget."""

    def __init__(self, *args: Any, guarded: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, guarded=True)


class Unguarded(RematPartitioner):
    """The same plans, compiled by plain Inductor."""

    def __init__(self, *args: Any, guarded: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, guarded=False)


def trained(case: Case, partitioner_type: type[RematPartitioner], memory_budget: str) -> harness.Training:
    """The case under our backend, with the guard or without."""
    config = RematConfig(memory_budget=memory_budget)  # type: ignore[arg-type]

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_graph(gm, example_inputs, config, {}, partitioner_type)

    return harness.training(case, backend=backend)


pytestmark = pytest.mark.usefixtures("uncached")


def fan(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Twelve values that read `x`, each for a matmul of its own: a plan recomputes each just before it is needed."""
    total = torch.zeros((), dtype=x.dtype)
    for k, weight in enumerate(weights):
        total = total + (torch.sin(x + k) @ weight).sum()
    return total


def measured(call: Callable[..., torch.Tensor], *, has_kernels: bool) -> int:
    """Peak of a step: `x` is 1 MiB, the weights are small.  The gradients are those of eager mode where kernels run."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    weights = [torch.randn(64, 4, requires_grad=True) for _ in range(READERS)]

    def step() -> None:
        call(x, *weights).backward()

    step()
    actual = [w.grad for w in weights]
    for weight in weights:
        weight.grad = None
    fan(x, *weights).backward()
    if has_kernels:
        torch.testing.assert_close(actual, [w.grad for w in weights], rtol=1e-3, atol=1e-3)
    for weight in weights:
        weight.grad = None
    return peak_bytes(step, "cpu").peak_bytes


def compiled() -> Any:
    return torch.compile(fan, backend=remat, options={"memory_budget": "min"})


@pytest.mark.parametrize("has_kernels", [False, pytest.param(True, marks=pytest.mark.full)])
def test_recomputed_siblings_stay_apart(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Without kernels, which `test_what_plain_inductor_makes_of_the_same_plan_needs_more` has, peaks alone are compared."""
    if not has_kernels:
        request.getfixturevalue("empty_kernels")
    guarded = measured(compiled(), has_kernels=has_kernels)
    (report,) = compile_remat.reports()
    torch.compiler.reset()

    def without_guard(*args: Any, **kwargs: Any) -> Any:
        return compile_with_partitioner(*args, **{**kwargs, "guarded": False})

    monkeypatch.setattr(driver, "compile_with_partitioner", without_guard)
    unguarded = measured(compiled(), has_kernels=has_kernels)
    assert report.num_recomputed >= READERS
    assert guarded <= 1.05 * report.predicted_peak_bytes
    assert 3 * guarded < unguarded


@pytest.mark.usefixtures("empty_kernels")
def test_plain_inductor_keeps_its_own_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(*args: Any) -> bool:
        asked.append(1)
        return False

    monkeypatch.setattr(GuardedChoices, "can_fuse_horizontal", staticmethod(count))
    inputs = [torch.randn(64, 8), *[torch.randn(8, 4, requires_grad=True) for _ in range(3)]]
    compiled()(*inputs).backward()
    used = len(asked)
    assert used > 0
    torch.compiler.reset()
    torch.compile(fan)(*inputs).backward()
    torch.compiler.reset()
    torch.compile(fan, backend=remat, options={"memory_budget": "max"})(
        *inputs
    ).backward()  # `max` is Inductor as it is
    assert len(asked) == used


# -- matmuls stay where they stand ------------------------------------------------------------------------------------


def peak_of(case: str, partitioner_type: type[RematPartitioner]) -> tuple[int, list[torch.Tensor | None]]:
    """Measured peak of a step at the lowest plan, and its gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    module, inputs = joining_models.CASES[case](0.5)
    run = trained(Case(case, module, inputs, ""), partitioner_type, "min")
    run.clear_and_step()
    gradients = [p.grad for p in module.parameters()]
    run.clear()
    return peak_bytes(run.step, "cpu").peak_bytes, gradients


@pytest.mark.parametrize(
    ("case", "saved_bytes"),
    [
        ("tied", MIB // 2),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("positions", 29 * MIB // 10), ("heads", MIB))),
    ],
)
def test_what_plain_inductor_makes_of_the_same_plan_needs_more(case: str, saved_bytes: int) -> None:
    guarded, actual = peak_of(case, Guarded)
    (report,) = compile_remat.reports()
    unguarded, expected = peak_of(case, Unguarded)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)
    assert report.predicted_peak_bytes is not None
    assert guarded <= 1.03 * report.predicted_peak_bytes
    assert unguarded >= guarded + saved_bytes


@pytest.mark.usefixtures("empty_kernels")
def test_the_gradient_of_a_tied_weight_is_made_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded, _ = peak_of("tied", Guarded)
    others = tuple(r for r in rewrite_list.REWRITES if r.name != "keep_matmuls_in_place")
    monkeypatch.setattr(rewrite_list, "REWRITES", others)
    moved, _ = peak_of("tied", Guarded)
    assert moved > guarded + MIB // 2


def traced(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    with FakeTensorMode() as mode:
        return make_fx(function)(*(mode.from_tensor(a) for a in args))


def test_a_scaled_addition_far_from_its_matmul_is_hidden_from_the_pattern_once() -> None:
    def far(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        early = a @ b
        return torch.add(early, c @ c @ c, alpha=2)

    inputs = torch.randn(4, 3), torch.randn(3, 4), torch.randn(4, 4)
    module = traced(far, *inputs)
    assert [keep_matmuls_in_place(module).count for _ in range(2)] == [1, 0]
    torch.testing.assert_close(module(*inputs), far(*inputs))


def test_of_two_products_the_near_one_becomes_the_kernel_that_adds() -> None:
    """Inductor takes the last summand first: as the first, the far product moved, and what it reads lived until the addition."""

    def summed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        early = a @ b
        return (c @ c) + early

    a, b, c = torch.randn(4, 3), torch.randn(3, 4), torch.randn(4, 4)
    module = traced(summed, a, b, c)
    assert keep_matmuls_in_place(module).count == 0
    (total,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert [node.name for node in total.args] == ["mm", "mm_1"]
    torch.testing.assert_close(module(a, b, c), summed(a, b, c))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c: (a @ b) + c,  # nothing lies between
        lambda a, b, c: (a @ b) + (c @ c)[0],  # a row for every row
        lambda a, b, c: ((m := a @ b), m + c @ c @ c),  # the product is wanted by itself
        lambda a, b, c: (a @ b + 1) + c @ c,
    ],
    ids=["near", "broadcast", "used twice", "no product"],
)
def test_other_additions_stay(function: Callable[..., Any]) -> None:
    module = traced(function, torch.randn(4, 3), torch.randn(3, 4), torch.randn(4, 4))
    before = str(module.graph)
    assert keep_matmuls_in_place(module).count == 0
    assert str(module.graph) == before
