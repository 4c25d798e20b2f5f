"""Inputs that a backward reads again: by their positions, and for plain torch.compile as torch's own partition has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compile_remat._torch.joint_graph import copied_graph, plain_choice, torch_partition
from compile_remat.cost_models import UnitCost
from compile_remat.passes import Planner, build_problem, extract
from compile_remat.passes.graph.normalise import as_in_torch
from compile_remat.passes.graph.read_inputs import inputs_handed_over, positions_of_inputs
from compile_remat.passes.graph.snapshots import readable_inputs
from tests.passes.joint import joint_of

ROWS, WIDTH = 64, 8


def tensor(*sizes: int, grad: bool = False) -> Tensor:
    return torch.randn(*sizes).requires_grad_(grad)


def layer(x: Tensor, weight: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    return F.gelu(F.gelu(F.linear(x, weight, bias)) @ second)


def part_of_a_bank(x: Tensor, bank: Tensor) -> Tensor:
    return (x @ bank[:WIDTH].t()).exp()


def words(indices: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.embedding(indices, table)) @ weight


X, INDICES = tensor(ROWS, WIDTH), torch.randint(16, (ROWS,))
SQUARE = tensor(WIDTH, WIDTH, grad=True)
PROGRAMS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], set[int]]] = {
    "a layer that reads its input for the gradient of its weight": (
        layer,
        (X, SQUARE, tensor(WIDTH, grad=True), tensor(WIDTH, WIDTH, grad=True)),
        {0, 3},
    ),
    "a frozen layer reads its weight": (
        layer,
        (tensor(ROWS, WIDTH, grad=True), *map(torch.Tensor.detach, (SQUARE, SQUARE[0], SQUARE))),
        {1, 3},
    ),
    "a view counts as its base": (part_of_a_bank, (tensor(ROWS, WIDTH, grad=True), tensor(32, WIDTH)), {1}),
    "an embedding reads its indices": (words, (INDICES, tensor(16, WIDTH, grad=True), SQUARE), {0, 2}),
}


@pytest.mark.parametrize(("function", "arguments", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_plain_torch_compile_reads(
    function: Callable[..., Tensor], arguments: tuple[Tensor, ...], expected: set[int]
) -> None:
    traced = joint_of(function, *arguments)
    outputs = {"num_fwd_outputs": traced.num_fwd_outputs}
    joint = as_in_torch(copied_graph(traced.module), **outputs)
    found = positions_of_inputs(joint, readable_inputs(joint, plain_choice(joint)).names)
    forward, _ = torch_partition(traced.module, traced.inputs, **outputs)
    assert found == inputs_handed_over(forward, **outputs) == expected


def test_the_lowest_plan_reads_what_it_recomputes_from() -> None:
    """Two layers behind a bias: the plan saves none of them, and starts at the input again."""
    traced = joint_of(layer, X, SQUARE, tensor(WIDTH, grad=True), tensor(WIDTH, WIDTH, grad=True))
    joint = as_in_torch(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    plan = Planner(build_problem(joint, cost=UnitCost())).lowest()
    forward, _ = extract(joint, plan)
    assert inputs_handed_over(forward, traced.num_fwd_outputs) == {0, 1, 2, 3}
