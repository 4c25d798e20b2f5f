"""Behaviours that torch's own tests require of a partitioner, required of ours.

The functions are those kinds that pytorch tests in test_aotdispatch (TestPartitioning), test_ac, test_ac_knapsack,
test_perf (min-cut) and test_activation_checkpointing; the numbers in comments are what these expect of torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_remat import partition
from compile_remat._torch import joint_graph, sizes
from compile_remat.cost_models import Roofline, UnitCost, load_device
from compile_remat.passes import Plan, Planner, Problem, build_problem
from tests.correctness.captured import Captured, capture, run

ATEN = torch.ops.aten
SIDE = 16


def leaf(*shape: int, **keywords: Any) -> Tensor:
    return torch.randn(*shape, requires_grad=True, **keywords)


def squares(count: int, side: int = SIDE) -> list[Tensor]:
    """Square matrices, scaled so that products of several keep their size."""
    return [(torch.randn(side, side) / side**0.5).requires_grad_() for _ in range(count)]


# -- the functions ----------------------------------------------------------------------------------------------------


def product_of_shifted(a: Tensor) -> Tensor:
    a = torch.mm(a, a) + 1
    return torch.mm(a, a + 2)


def chunked(x: Tensor) -> Tensor:
    a, b, c = x.sin().chunk(3)
    return a.exp() * b + c.cos()


def transposed(x: Tensor) -> Tensor:
    """The backward views a transposed tensor, so that strides matter."""
    return (x.transpose(0, 1) * 2.0).reshape(-1).sin()


def even_chain(x: Tensor, *weights: Tensor) -> Tensor:
    x = x.cos()
    for w in weights:
        x = torch.mm(x, w).cos()
    return x.sum()


def fan_of_products(x: Tensor, *weights: Tensor) -> Tensor:
    total = x.new_zeros(())
    for w in weights:
        total = total + torch.mm(x, w).cos().sum()
    return total


def attention_then_product(x: Tensor, w: Tensor) -> Tensor:
    q = x.reshape(1, 1, *x.shape)
    return torch.mm(F.scaled_dot_product_attention(q, q, q).reshape(x.shape), w).cos().sum()


def residual_sums(x: Tensor, *weights: Tensor) -> Tensor:
    for w in weights:
        x = x + torch.relu(x @ w)
    return x


def region(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(x, y))


def two_products(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


def checkpointed_twice(x: Tensor, y: Tensor) -> Tensor:
    z = checkpoint(region, torch.sin(x), y, use_reentrant=False)
    return checkpoint(region, z.sin(), y, use_reentrant=False)


def checkpointed_by_manual_regions(x: Tensor) -> Tensor:
    def long(x: Tensor) -> Tensor:
        y = x @ x.T
        y = y @ y
        return (y @ y) @ x

    for _ in range(2):
        x = checkpoint(long, x, use_reentrant=False)
    return x


def selective(policy: Any, function: Callable[..., Tensor] = two_products) -> Callable[..., Tensor]:
    context = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = checkpoint(function, x, y, use_reentrant=False, context_fn=context)
        return result

    return call


def products_are(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        return answer if operator is ATEN.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], Sequence[Tensor]]]] = {
    "cosines": (lambda x: x.cos().cos().cos(), lambda: [leaf(10)]),
    "sum of four": (lambda a, b, c, d: (a + b + c + d).cos().cos(), lambda: [leaf(10) for _ in range(4)]),
    "masked": (lambda x: (x < 0) * x, lambda: [leaf(100)]),
    "product with ones": (lambda x: torch.mm(x, x.new_ones(x.shape)).tanh().tanh(), lambda: [leaf(10, 10)]),
    "product of shifted": (product_of_shifted, lambda: squares(1, 10)),
    "outer sum": (lambda a, b: (a * b).cos().sum(dim=1), lambda: [leaf(20, 1), leaf(1, 20)]),
    "concatenated": (lambda a, b: torch.cat([torch.tanh(a), b]), lambda: [leaf(10), leaf(10)]),
    "two sines": (lambda a, b: torch.sin(torch.sin(a)) + b, lambda: squares(2)),
    "cube": (lambda x: x * x * x, lambda: [leaf(SIDE)]),
    "layer norm": (
        lambda x, weight, bias: F.layer_norm(x, [SIDE], weight, bias, eps=1e-6),
        lambda: [leaf(12, SIDE), leaf(SIDE), leaf(SIDE)],
    ),
    "chunks": (chunked, lambda: [leaf(12, SIDE)]),
    "transposed": (transposed, lambda: [leaf(4, 6)]),
    "cheap, then a product": (lambda x, w: torch.mm(x.cos(), w), lambda: squares(2)),
    "even chain": (even_chain, lambda: [leaf(128, SIDE), *squares(8)]),
    "fan of products": (fan_of_products, lambda: [leaf(128, SIDE), *(leaf(SIDE, 8 * k) for k in (11, 3, 4, 2))]),
    "attention, then a product": (attention_then_product, lambda: [leaf(32, SIDE), leaf(SIDE, SIDE)]),
    "gelu": (lambda x, w: F.gelu(F.gelu(x @ w) @ w), lambda: [leaf(128, SIDE), *squares(1)]),
    "softmax": (lambda x, w: torch.softmax(x @ w, -1) @ w, lambda: squares(2)),
    "residual sums": (residual_sums, lambda: [leaf(128, SIDE), *squares(5)]),
    "checkpoint": (lambda x, y: checkpoint(region, torch.sin(x), y, use_reentrant=False), lambda: squares(2)),
    "checkpoint twice": (checkpointed_twice, lambda: squares(2)),
    "manual regions": (checkpointed_by_manual_regions, lambda: [(torch.randn(8, 64) / 8).requires_grad_()]),
    "products must be saved": (selective(products_are(CheckpointPolicy.MUST_SAVE)), lambda: squares(2)),
    "products must be recomputed": (selective(products_are(CheckpointPolicy.MUST_RECOMPUTE)), lambda: squares(2)),
    "products preferably saved": (selective(products_are(CheckpointPolicy.PREFER_SAVE)), lambda: squares(2)),
}


def ours(budget: object = "max") -> Callable[..., Any]:
    return functools.partial(partition, memory_budget=budget)


@functools.cache
def both(name: str) -> tuple[Captured, Captured]:
    """Captures under our partitioner at `max`, and under torch's."""
    function, make = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = make()
    return capture(function, inputs, ours()), capture(function, inputs, min_cut_rematerialization_partition)


def seeded(name: str) -> tuple[Callable[..., Any], Sequence[Tensor]]:
    function, make = FUNCTIONS[name]
    torch.manual_seed(0)
    return function, make()


# -- at max: nowhere worse than torch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_max_moves_no_more_bytes_than_torchs_min_cut(name: str) -> None:
    mine, theirs = both(name)
    assert mine.kernel_bytes <= theirs.kernel_bytes


@pytest.mark.parametrize("name", FUNCTIONS)
def test_max_saves_no_more_bytes_than_torchs_min_cut(name: str) -> None:
    """Storages count once, and an output of the function counts as nothing: it is alive anyway."""
    mine, theirs = both(name)
    assert saved_bytes(mine) <= saved_bytes(theirs)


def saved_bytes(captured: Captured) -> int:
    return sum(sizes.storage_nbytes(n.meta["val"]) for n in captured.saved_roots())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_at_max_and_min(name: str) -> None:
    function, inputs = seeded(name)
    expected = run(function, inputs)
    torch.testing.assert_close(both(name)[0].results, expected)
    torch.testing.assert_close(capture(function, inputs, ours("min")).results, expected)


# -- what is handed from forward to backward --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "checkpoint" not in n and "must be rec" not in n])
def test_no_product_runs_twice_at_max_that_does_not_in_torch(name: str) -> None:
    mine, theirs = both(name)
    for product in (ATEN.mm, ATEN.addmm, ATEN.bmm):
        assert mine.count("backward", product) <= theirs.count("backward", product)


def test_the_items_of_a_kernel_are_handed_over_and_never_the_tuple() -> None:
    for name in ("layer norm", "chunks", "attention, then a product"):
        for node in both(name)[0].handed_over():
            assert isinstance(node.meta["val"], Tensor), name


def test_items_stand_right_behind_their_kernel() -> None:
    for graph in (*both("layer norm")[0].forwards, *both("attention, then a product")[0].backwards):
        nodes = list(graph.nodes)
        for k, node in enumerate(nodes):
            if node.target is operator.getitem:
                assert nodes[k - 1] is node.args[0] or nodes[k - 1].target is operator.getitem


def test_sizes_are_handed_over_instead_of_what_has_them() -> None:
    """The gradient of a sum needs the shape of its input alone."""
    captured = capture(lambda x: x.sum(dim=1), [leaf(10, 7)], ours(), dynamic=True)
    assert all(is_sym_node(n) for n in captured.handed_over()) and len(captured.handed_over()) == 2


def test_sizes_that_are_computed_with_are_handed_over() -> None:
    def sized(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.cat([a.expand(b.shape[0] + c.shape[0], a.shape[0]), b, c])

    captured = capture(sized, [leaf(10), leaf(3, 10), leaf(2, 10)], ours(), dynamic=True)
    assert captured.handed_over() and all(is_sym_node(n) for n in captured.handed_over())


@pytest.mark.parametrize("budget", ["max", "min"])
def test_sizes_come_after_tensors(budget: str) -> None:
    """Autograd wants the forward's results, then saved tensors, then saved sizes."""

    def mixed(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Any, Tensor]:
        joined = torch.cat([a.expand(b.shape[0] + c.shape[0], a.shape[0]), b, c])
        product = torch.mm(joined, d)
        return joined, b.shape[0], torch.mm(product, a.view(product.shape[1], a.shape[0])).sin()

    inputs = [leaf(10), leaf(3, 10), leaf(2, 10), leaf(10, 1)]
    captured = capture(mixed, inputs, ours(budget), dynamic=True)
    torch.testing.assert_close(captured.results, run(mixed, inputs))
    outputs = next(iter(captured.forwards[0].find_nodes(op="output"))).args[0]
    extra = [is_sym_node(n) for n in outputs[3:]]
    assert extra == sorted(extra) and len(set(extra)) == 2


# -- budgets ----------------------------------------------------------------------------------------------------------


def problem_of(name: str, cost: Any = None) -> tuple[Problem, dict[float, list[str]]]:
    """The problem, and the roots of what torch's partitioner saves at each of its ratios."""
    found: list[tuple[Problem, dict[float, list[str]]]] = []

    def spy(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        prepared = joint_graph.prepare(joint, num_fwd_outputs=num_fwd_outputs)
        choices: dict[float, list[str]] = {}
        for ratio in RATIOS:
            reference = joint_graph.torch_choice(prepared, ratio)
            problem = build_problem(prepared, cost=cost or UnitCost(), reference=reference)
            choices[ratio] = [problem.values[i].name for i in problem.reference]
        found.append((problem, choices))
        return joint_graph.extract_modules(prepared, joint_graph.torch_choice(prepared))

    function, inputs = seeded(name)
    capture(function, inputs, spy)
    return found[0]


RATIOS = (1.0, 0.8, 0.6, 0.4, 0.2)
BUDGETED = [n for n in FUNCTIONS if "check" not in n and "manual" not in n and "must" not in n and "pref" not in n]


def plan_saving(planner: Planner, names: Sequence[str]) -> Plan:
    return planner.plan_of(planner.mask_of(names), None)


@pytest.mark.parametrize("name", BUDGETED)
def test_at_torchs_peak_we_are_no_slower_and_at_its_time_no_larger(name: str) -> None:
    problem, choices = problem_of(name, Roofline(load_device("cpu")))
    planner = Planner(problem)
    for ratio, names in choices.items():
        theirs = plan_saving(planner, names)
        mine = planner.within(theirs.peak_bytes)
        assert mine.is_feasible and mine.extra_time_ns <= theirs.extra_time_ns, ratio


def test_what_is_cheap_is_given_up_before_any_product() -> None:
    problem, _ = problem_of("even chain", Roofline(load_device("cpu")))
    planner = Planner(problem)
    products = [v.name for v in problem.values if v.name.startswith("mm")]
    for budget in np.linspace(planner.fastest().peak_bytes, planner.lowest().peak_bytes, 12):
        plan = planner.within(int(budget))
        if set(products) & set(plan.recomputed):
            assert {v.name for v in problem.values if v.name.startswith("cos")} & set(plan.recomputed)


# -- checkpoint: how often an operator runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("checkpoint", 1, 3),  # one again, and two for its gradients
        ("checkpoint twice", 2, 6),
        ("products must be saved", 2, 4),
        ("products preferably saved", 2, 4),
        ("products must be recomputed", 2, 6),
    ],
)
def test_how_often_products_run(name: str, forward: int, backward: int) -> None:
    mine, theirs = both(name)
    assert (mine.count("forward", ATEN.mm), mine.count("backward", ATEN.mm)) == (forward, backward)
    assert theirs.count("backward", ATEN.mm) == backward


def test_only_what_is_inside_a_region_is_computed_again() -> None:
    def around(x: Tensor, y: Tensor) -> Tensor:
        z = torch.mm(x, y)
        z = checkpoint(lambda z: torch.tanh(torch.mm(z, y)), z, use_reentrant=False)
        return torch.mm(z, y)

    captured = capture(around, squares(2), ours())
    assert (captured.count("forward", ATEN.mm), captured.count("backward", ATEN.mm)) == (3, 6 + 1)


def test_a_policy_may_answer_by_position() -> None:
    """The first of two products is saved, the second is not."""

    def policy() -> Any:
        seen = 0

        def answer(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
            nonlocal seen
            if operator is ATEN.mm.default:
                seen += 1
                return CheckpointPolicy.MUST_SAVE if seen == 1 else CheckpointPolicy.MUST_RECOMPUTE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(answer)

    def call(x: Tensor, y: Tensor) -> Any:
        return checkpoint(two_products, x, y, use_reentrant=False, context_fn=policy)

    captured = capture(call, squares(2), ours())
    assert (captured.count("forward", ATEN.mm), captured.count("backward", ATEN.mm)) == (2, 5)


def test_a_region_with_keywords_and_several_results() -> None:
    def several(x: Tensor, *, y: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.mm(x, y)
        return torch.sin(z), torch.exp(-z * z)

    def call(x: Tensor, y: Tensor) -> Any:
        return checkpoint(several, x, y=y, use_reentrant=False)

    inputs = squares(2)
    captured = capture(call, inputs, ours())
    torch.testing.assert_close(captured.results, run(call, inputs))
    assert captured.count("backward", ATEN.mm) == 3
