"""Calls of regions become their bodies: the same numbers, one graph to plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import compile_remat
from compile_remat.device import measure
from compile_remat.passes.graph.rewrites.called_regions import calls_regions, inline_regions, inlined_calls
from compile_remat.report import reports, reset_reports


def captured(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, Sequence[Any]]:
    """Dynamo's graph of a call, and what it is called with."""
    seen: list[tuple[fx.GraphModule, Sequence[Any]]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        seen.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return seen[0]


def calls(graph: fx.Graph) -> str:
    """The graph's calls, a line each."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    return "\n".join(f"{n.name} = {getattr(n.target, '__name__', n.target)}({n.args})" for n in nodes)


def test_a_call_becomes_the_body() -> None:
    region = torch.compiler.nested_compile_region(lambda x: (torch.sin(x), torch.cos(x)))

    def twice(x: Tensor) -> Tensor:
        left, right = region(x)
        left, right = region(left + right)
        return left * right

    gm, _ = captured(twice, torch.ones(2, requires_grad=True))
    assert calls_regions(gm)
    assert inline_regions(gm).count == 2
    gm.graph.lint()
    assert_expected_inline(
        calls(gm.graph),
        """\
sin = sin((l_x_,))
cos = cos((l_x_,))
add = add((sin, cos))
sin_1 = sin((add,))
cos_1 = cos((add,))
mul = mul((sin_1, cos_1))""",
    )
    assert not calls_regions(gm)
    assert inlined_calls(gm) == 2


tanh = torch.compiler.nested_compile_region(lambda x: torch.tanh(x))


def in_a_region(x: Tensor, layer: nn.Module) -> Tensor:
    return torch.sin(tanh(layer(x)) + torch.tensor([1.0, 2.0]))


def in_a_checkpoint(x: Tensor, layer: nn.Module) -> Tensor:
    kept: Tensor = checkpoint(lambda x: torch.sin(tanh(layer(x))), x, use_reentrant=False)
    return kept


def in_a_branch(x: Tensor, layer: nn.Module) -> Tensor:
    taken: Tensor = torch.cond(x.sum() > 0, lambda x: tanh(layer(x)), torch.sin, (x,))
    return taken


@pytest.mark.parametrize("block", [in_a_region, in_a_checkpoint, in_a_branch])
def test_graphs_inside_are_searched_as_well(block: Callable[..., Tensor]) -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    marked = torch.compiler.nested_compile_region(block) if block is in_a_region else block

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = marked(x, layer)
        return x

    x = torch.randn(4, 2, requires_grad=True)
    gm, inputs = captured(model, x)
    expected = gm(*inputs)
    inline_regions(gm)
    assert not calls_regions(gm)
    torch.testing.assert_close(gm(*inputs), expected)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        wide = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(wide)


def peak_bytes(budget: str, *, is_marked: bool) -> list[tuple[int | None, int]]:
    """For each planned graph: the codegen peak, and the number of inlined calls."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block() for _ in range(4)])

    def call(block: nn.Module, x: Tensor) -> Any:
        return block(x)

    run = torch.compiler.nested_compile_region(call) if is_marked else call

    def model(x: Tensor) -> Tensor:
        for block in blocks:
            x = run(block, x)
        return x.square().mean()

    torch.compiler.reset()
    reset_reports()
    x = torch.randn(512, 32, requires_grad=True)
    torch.compile(model, backend="remat", options={"memory_budget": budget})(x).backward()
    return [(report.scheduled_peak_bytes, report.inlined_calls) for report in reports()]


@pytest.mark.usefixtures("empty_kernels")
def test_under_a_budget_marked_blocks_are_planned_as_unmarked_ones() -> None:
    ((marked_bytes, inlined),) = peak_bytes("min", is_marked=True)
    ((bare_bytes, none),) = peak_bytes("min", is_marked=False)
    assert marked_bytes == bare_bytes
    assert (inlined, none) == (4, 0)


@pytest.mark.usefixtures("empty_kernels")
def test_without_a_limit_they_stay_calls(recwarn: pytest.WarningsRecorder) -> None:
    assert {inlined for _, inlined in peak_bytes("max", is_marked=True)} == {0}
    assert not [w for w in recwarn if "planner failed" in str(w.message)]  # of the regions' backward graphs


@pytest.mark.usefixtures("empty_kernels")
def test_a_budget_holds_where_inductor_cuts_a_loss_into_chunks() -> None:
    """Inductor does so before the graph is planned: bodies count, and the dry run sees them.  20 MiB were once 28.9, silently."""

    def loss(x: Tensor, w: Tensor, head: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy((x @ w).relu() @ head, target)

    x, w, head = (torch.randn(shape).requires_grad_() for shape in ((1024, 64), (64, 64), (64, 4096)))
    arguments = (x, w, head, torch.randint(0, 4096, (1024,)))
    peaks = {}
    for is_on in (False, True):
        torch.compiler.reset()
        reset_reports()
        with torch._inductor.config.patch({"auto_chunker.enable": is_on}), warnings.catch_warnings():
            warnings.simplefilter("error", compile_remat.PlannerWarning)
            step = torch.compile(loss, backend="remat", options={"memory_budget": "min"})
            step(*arguments).backward()
            with measure.recorded("cpu") as measured:
                step(*arguments).backward()
        (report,) = reports()
        assert report.caveat == "" and report.scheduled_peak_bytes and report.predicted_peak_bytes
        peaks[is_on] = report.scheduled_peak_bytes
        # gradients are added to those of the step before
        assert measured[0].peak_bytes <= report.scheduled_peak_bytes + sum(t.nbytes for t in (x, w, head)) + 1024
        assert 1 <= report.predicted_peak_bytes / report.scheduled_peak_bytes < 1.35
    assert peaks[True] < 0.6 * peaks[False]


def test_explain_says_it() -> None:
    x = torch.ones(2, requires_grad=True)
    assert compile_remat.explain(lambda x: tanh(tanh(x)), x, memory_budget="min").inlined_calls == 2
    assert compile_remat.explain(lambda x: tanh(tanh(x)), x, memory_budget="max").inlined_calls == 0
