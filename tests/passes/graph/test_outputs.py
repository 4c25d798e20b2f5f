"""Outputs that a plan must not save, since code behind a graph break may change them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.outputs import changeable_outputs, left_alone
from tests.passes.joint import joint_of

Outputs = tuple[Tensor, ...]


def pairs(h: Tensor, w: Tensor) -> Tensor:
    """Reads sums of pairs; no derivative reads what is summed."""
    return torch.sin(h.view(8, 4, 2).sum(-1)) @ w[:4]


def summed(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return h, pairs(h, w)


def read_by_a_derivative(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return h, torch.sin(h) @ w


def view_of_what_a_derivative_reads(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return h.view(-1), pairs(torch.sin(h), w)


def part_of_a_split(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return h.split(4)[1].detach(), pairs(h, w)


def read_by_no_backward(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return pairs(h, w), (h * 2).mean()


def saved_by_plain(x: Tensor, w: Tensor) -> Outputs:
    h = x @ w
    return h, torch.sin(h * 2) @ w


@pytest.mark.parametrize(
    ("function", "changeable", "left"),
    [
        (summed, {"mm"}, {"mm"}),
        (read_by_a_derivative, set(), set()),
        (view_of_what_a_derivative_reads, {"mm"}, set()),
        (part_of_a_split, {"mm"}, {"mm"}),
        (read_by_no_backward, set(), set()),
        (saved_by_plain, {"mm"}, set()),
    ],
)
def test_changeable_outputs(function: Callable[..., Any], changeable: set[str], left: set[str]) -> None:
    traced = joint_of(function, torch.randn(8, 8), torch.randn(8, 8, requires_grad=True))
    joint = joint_graph.prepare(traced.module, num_fwd_outputs=traced.num_fwd_outputs)
    found = changeable_outputs(joint)
    assert {node.name for node in found} == changeable
    assert {node.name for node in left_alone(found, joint_graph.plain_choice(joint))} == left
