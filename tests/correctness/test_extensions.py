"""Additions of users and libraries to torch: autograd functions, custom operators, regions, control flow, tensor subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_remat._torch.version import torch_version
from compile_remat.backend import remat
from tests.correctness.harness import Case, Observed, Wrap, check, train

pytestmark = pytest.mark.usefixtures("one_rank")


# -- autograd functions -----------------------------------------------------------------------------------------------


class Clipped(torch.autograd.Function):
    """Saves an input, an intermediate and a Python number; its derivative is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: float) -> torch.Tensor:
        inner = torch.sin(x)
        ctx.save_for_backward(x, inner)
        ctx.bound = bound
        return inner.clamp(-bound, bound) * torch.exp(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, inner = ctx.saved_tensors
        return gradient * torch.cos(inner) * torch.exp(-x * ctx.bound), None


class Ranked(torch.autograd.Function):
    """Two outputs, one of them not differentiable; gradients that are missing stay None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, order = torch.sort(torch.tanh(x @ weight), dim=-1)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, order, values)
        return values, order, values * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight, order, values = ctx.saved_tensors
        first, _, last = gradients
        total = (first if last is None else last * 2 if first is None else first + 2 * last) * (1 - values**2)
        scattered = torch.zeros_like(total).scatter(1, order, total)
        return scattered @ weight.t(), x.t() @ scattered if ctx.needs_input_grad[1] else None


class Functions(nn.Module):
    """Both functions, the second once with an output that the loss never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = Clipped.apply(self.layer(x), 0.7)
        values, order, _ = Ranked.apply(h, self.weight)
        _, _, doubled = Ranked.apply(torch.sin(values), self.weight.detach())
        return torch.sin(doubled) * Clipped.apply(values, 0.3), order


def autograd_functions(wrap: Wrap) -> Observed:
    return train(Functions(), [torch.randn(10, 8)], wrap)


# -- custom operators -------------------------------------------------------------------------------------------------

calls: list[str] = []


@torch.library.custom_op("compile_remat_tests::wave", mutates_args=())
def wave(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """With a derivative, which needs the second output."""
    calls.append("wave")
    return torch.sin(x * factor), torch.cos(x * factor)


@wave.register_fake
def _(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _wave_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.factor = inputs[1]
    ctx.save_for_backward(output[1])


def _wave_backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
    return wave_gradient(gradient, ctx.saved_tensors[0], ctx.factor), None


wave.register_autograd(_wave_backward, setup_context=_wave_context)


@torch.library.custom_op("compile_remat_tests::wave_gradient", mutates_args=())
def wave_gradient(gradient: torch.Tensor, cosine: torch.Tensor, factor: float) -> torch.Tensor:
    calls.append("wave_gradient")
    return gradient * cosine * factor


@wave_gradient.register_fake
def _(gradient: torch.Tensor, cosine: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(gradient)


@torch.library.custom_op("compile_remat_tests::counter", mutates_args=())
def counter(x: torch.Tensor) -> torch.Tensor:
    """Without a derivative, and not pure: each call returns another number."""
    calls.append("counter")
    return torch.full_like(x, 0.1 * len(calls))


@counter.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("compile_remat_tests::fill_sine", mutates_args=("out",))
def fill_sine(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes into an argument and returns nothing."""
    calls.append("fill_sine")
    out.copy_(torch.sin(x))


@fill_sine.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


class CustomOperators(nn.Module):
    """The results of custom operators are needed by the backward, through pointwise work that is cheap to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layers[0](x)
        h = torch.exp(wave(h, 0.7)[0]) * torch.sin(counter(h.detach()))
        buffer = torch.empty_like(h)
        fill_sine(self.layers[1](h).detach(), buffer)
        return torch.sin(self.layers[2](h) * torch.exp(buffer))


def custom_operators(wrap: Wrap) -> Observed:
    calls.clear()
    return train(CustomOperators(), [torch.randn(10, 8)], wrap) | {"calls": sorted(calls)}


# -- regions and control flow -----------------------------------------------------------------------------------------


class Regions(nn.Module):
    """A block compiled once and called for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        @torch.compiler.nested_compile_region
        def block(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            h = torch.sin(torch.nn.functional.linear(torch.exp(torch.sin(x)), weight, bias))
            return h + x, h.amax()

        for layer in self.layers:
            x, top = block(x, layer.weight, layer.bias)
            x = torch.sin(self.norm(x)) / (1 + top**2)
        return x


def nested_regions(wrap: Wrap) -> Observed:
    return train(Regions(), [torch.randn(10, 8, requires_grad=True)], wrap)


class Branches(nn.Module):
    """A branch that the data decides, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def one(h: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layers[0](torch.sin(h)))

        def other(h: torch.Tensor) -> torch.Tensor:
            return torch.exp(torch.sin(self.layers[1](h))) * torch.sin(h)

        for sign in (1, -1):
            x = torch.sin(torch.cond(sign * x.sum() > 0, one, other, (torch.sin(x),)))
        return x


def branches(wrap: Wrap) -> Observed:
    return train(Branches(), [torch.randn(10, 8, requires_grad=True)], wrap)


class Scanned(nn.Module):
    """A recurrence by `scan`, and a loop by `while_loop` whose result needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, h = self.layer.weight, torch.sin(self.layer(x))

        def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.sin(nn.functional.linear(state, weight) + row), torch.cos(state * row)

        last, rows = scan(step, torch.sin(x[0]), h)
        with torch.no_grad():
            _, norm = torch.while_loop(
                lambda k, value: k < 5,
                lambda k, value: (k + 1, torch.sin(value) * 1.5),
                (torch.zeros((), dtype=int), last),
            )
        return torch.sin(rows) * norm, torch.sin(last)


def scanned(wrap: Wrap) -> Observed:
    if torch_version() < (2, 13):
        pytest.skip(
            "torch 2.11's own compiler takes what this scan returns for an alias of what it reads; 2.12 was not tried"
        )
    return train(Scanned(), [torch.randn(6, 8)], wrap)


def score(score: torch.Tensor, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
    return torch.where(q >= k, score + 0.1 * (k - q), -torch.inf)


def flex_inference(wrap: Wrap) -> Observed:
    query, key, value = torch.randn(3, 1, 2, 32, 16)
    with torch.no_grad():
        return {"output": wrap(lambda *inputs: flex_attention(*inputs, score_mod=score))(query, key, value)}


# -- tensor subclasses ------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers whose parameters may be of any tensor class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.exp(torch.sin(layer(torch.sin(x))))
        return x


def two_tensors(wrap: Wrap) -> Observed:
    module = Layers()
    for layer in module.layers:
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach().clone(), 2 * layer.weight.detach()))
    output = wrap(module)(torch.randn(10, 8))
    output.sum().backward()
    seen = {"output a": output.a, "output b": output.b}
    for k, layer in enumerate(module.layers):
        seen |= {f"{k} a": layer.weight.grad.a, f"{k} b": layer.weight.grad.b, f"{k} bias": layer.bias.grad}
    return seen


def distributed_tensors(wrap: Wrap) -> Observed:
    """Column and row parallel layers: their collectives stand in the graph."""
    mesh, module = init_device_mesh("cpu", (1,)), Layers()
    for layer, placement in zip(module.layers, (Shard(0), Shard(1), Replicate()), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [placement]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Replicate()]))
    output = wrap(module)(distribute_tensor(torch.randn(10, 8), mesh, [Replicate()]))
    output.full_tensor().sum().backward()
    seen = {"output": output.full_tensor()}
    return seen | {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}


EAGER = ("eager",)

CASES = [
    Case("autograd_functions", autograd_functions),
    Case("custom_operators", custom_operators, rtol=1e-5, atol=1e-4),
    Case("nested_regions", nested_regions),
    Case("branches", branches),
    # Plain Inductor (2.13) cannot compile the backward of `scan` on CPU.
    Case("scanned", scanned, compilers=EAGER, rtol=1e-5, atol=1e-4),
    Case("flex_inference", flex_inference, plans=False, compilers=("inductor",)),
    Case("two_tensors", two_tensors, compilers=EAGER),
    Case("distributed_tensors", distributed_tensors),
]


def test_extensions(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


# -- what plain torch.compile refuses, and what users demand ----------------------------------------------------------


def test_a_custom_operator_runs_again_only_where_a_tag_says_so() -> None:
    module, x = CustomOperators(), torch.randn(10, 8)

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_wave = operator is torch.ops.compile_remat_tests.wave.default
        return CheckpointPolicy.MUST_RECOMPUTE if is_wave else CheckpointPolicy.PREFER_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def tagged(x: torch.Tensor) -> Any:
        return checkpoint(module, x, use_reentrant=False, context_fn=contexts)

    def calls_of(function: Callable[..., Any]) -> int:
        calls.clear()
        compiled = torch.compile(function, backend=remat, options={"memory_budget": "min", "compiler": "eager"})
        compiled(x).sum().backward()
        return calls.count("wave")

    assert calls_of(module) == 1
    assert calls_of(tagged) == 2
