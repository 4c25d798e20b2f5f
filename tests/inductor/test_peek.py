"""The patterns that a joint graph is searched for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat.inductor.peek import likely_patterns, look_at_joint_graph, pass_patterns


def gated(x: Tensor) -> Tensor:
    """Products of matrices alone, and an addition of 0, which Inductor drops."""
    return ((x @ x).sigmoid() * x + torch.zeros_like(x)).sum()


def attention(x: Tensor) -> Tensor:
    """Attention by hand, for which Inductor has patterns."""
    query = x.reshape(2, 4, 8, 16)
    scores = torch.matmul(query, query.transpose(-2, -1)).div(4.0)
    return torch.matmul(scores.softmax(-1), query).sum()


def seen(function: Any, context: AbstractContextManager[None]) -> tuple[str, list[int]]:
    """The code of the joint graph, and how many patterns each pass was applied with."""
    found, applied = list[str](), list[int]()
    original = type(pass_patterns[0]).apply

    def counted(self: Any, graph: Any) -> Any:
        if self in passes:
            applied.append(sum(map(len, self.patterns.values())))
        return original(self, graph)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        with context:
            look_at_joint_graph(gm, example_inputs, lambda joint, _: found.append(joint.code), {})
        return gm.forward

    passes = list(pass_patterns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pass_patterns[0]), "apply", counted)
        trace_isolated(function, backend, [torch.ones(32, 32, requires_grad=True)])
    assert pass_patterns == passes
    return found[0], applied


def test_a_graph_without_a_batched_product_is_not_searched_for_attention() -> None:
    code, applied = seen(gated, likely_patterns())
    plain_code, plain_applied = seen(gated, nullcontext())
    assert code == plain_code and "bmm" not in code
    assert sum(applied) < sum(plain_applied) / 2
    assert seen(gated, nullcontext()) == (plain_code, plain_applied)  # all patterns are there afterwards


def test_attention_by_hand_is_found() -> None:
    code, applied = seen(attention, likely_patterns())
    assert (code, applied) == seen(attention, nullcontext())
    assert "scaled_dot_product" in code
