"""Shapes of programs: graph breaks, parts without gradients, odd outputs, reused weights, inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compile_remat
from compile_remat.backend import remat
from tests.correctness.harness import Case, Observed, Wrap, check, plain_eager, tensors_of, train, weighted_sum


def layers(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(width, width) for _ in range(count)])


# -- several graphs ---------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Three graphs: values cross the breaks, one of them twice, and one graph needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sin(self.layers[0](x))
        h = torch.sin(self.layers[1](first))
        torch._dynamo.graph_break()
        with torch.no_grad():
            scale = torch.exp(self.layers[2](h)).mean()
        torch._dynamo.graph_break()
        return torch.sin(self.layers[3](h) * scale) * torch.exp(first)


def graph_breaks(wrap: Wrap) -> Observed:
    return train(Broken(), [torch.randn(16, 8)], wrap)


def called_twice(wrap: Wrap) -> Observed:
    """One compiled function runs three times before the backward: each call has saved values of its own."""
    module = Looped()
    part = wrap(module)
    return train(module, [torch.randn(16, 8)], lambda _: lambda x: part(part(x)) + torch.sin(part(2 * x)), steps=1)


# -- what comes in and goes out ---------------------------------------------------------------------------------------


class Outputs(nn.Module):
    """Nested outputs, some of them no tensors, some without a gradient; an input and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = layers(3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, nothing: torch.Tensor, missing: None = None) -> dict[str, Any]:
        h = torch.sin(self.layers[0](x))
        with torch.no_grad():
            target = torch.sin(self.layers[1](h))
        error = (torch.sin(self.layers[1](h)) - target * 0.9) ** 2
        gate = torch.sin(self.layers[2](h.detach()))
        return {
            "error": error,
            "nested": (gate, None, [h.argmax(-1), {"deep": torch.exp(h) * gate}]),
            "detached": torch.cos(h).detach(),
            "mask": h > 0,
            "constant": torch.arange(3),
            "number": 3,
            "missing": missing,
        }


def odd_outputs(wrap: Wrap) -> Observed:
    return train(Outputs(), [torch.randn(16, 8, requires_grad=True), torch.randn(3, requires_grad=True)], wrap)


def unused_output(wrap: Wrap) -> Observed:
    """The loss reads one output of several, so that some tangents do not exist."""
    return train(Outputs(), [torch.randn(16, 8), torch.randn(3)], wrap, loss=lambda out: out["nested"][0].sum())


# -- weights ----------------------------------------------------------------------------------------------------------


class Looped(nn.Module):
    """One layer used eight times, with Python deciding what happens around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for k in range(8):
            h = torch.sin(self.layer(seen[-1]))
            if k % 3 == 0:
                h = h * torch.sigmoid(self.gate(seen[k // 2]))
            elif k % 3 == 1:
                h = self.norm(h + seen[-2])
            seen.append(h + seen[-1] if k > 4 else h)
        return torch.stack(seen[::4]).sum(0)


def looped(wrap: Wrap) -> Observed:
    return train(Looped(), [torch.randn(16, 8, requires_grad=True)], wrap, learning_rate=1e-3)


# -- inference and mixed precision ------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Convolution, batch norm and dropout: what differs between training and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.head(F.dropout(F.relu(self.norm(self.conv(x))), 0.5, self.training)))


def no_grad(wrap: Wrap) -> Observed:
    module = Normed()
    call = wrap(module)
    with torch.no_grad():
        outputs = [call(torch.randn(6, 4, 8)) for _ in range(2)]
    module.eval()
    with torch.inference_mode():
        outputs += [call(torch.randn(6, 4, 8)) for _ in range(2)]
    return {f"output {k}": v for k, v in enumerate(outputs)} | dict(module.named_buffers())


class Autocast(nn.Module):
    """Autocast inside, with a part that turns it off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = layers(4), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = torch.sin(layer(x)) + x
            with torch.autocast("cpu", enabled=False):
                x = self.norm(x.float() @ self.layers[0].weight)
            return F.softmax(self.layers[1](x), -1) * x


def autocast(wrap: Wrap) -> Observed:
    return train(Autocast(), [torch.randn(16, 8)], wrap)


# -- autograd ---------------------------------------------------------------------------------------------------------


def compiled_autograd(wrap: Wrap) -> Observed:
    """The whole step is compiled, its backward through compiled autograd."""
    module, x = Looped(), torch.randn(16, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        loss = (output * torch.linspace(0.5, 1.5, 8)).sum()
        loss.backward()
        return output

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = wrap(step)
        outputs = [compiled(x) for _ in range(2)]
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {f"output {k}": v for k, v in enumerate(outputs)} | gradients


class Inner(nn.Module):
    """Derivatives and batches of functions, taken inside what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.layers[0].weight

        def energy(row: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.layers[1](torch.sin(row @ weight))).sum()

        slope = torch.func.vmap(torch.func.grad(energy))(x)
        curve = torch.func.vmap(torch.func.jacrev(torch.func.grad(energy)))(x[:3])
        _, pull = torch.func.vjp(lambda w: torch.sin(x @ w), weight)
        return torch.sin(slope), torch.exp(curve.mean()), pull(slope)[0]


def functional_transforms(wrap: Wrap) -> Observed:
    return train(Inner(), [torch.randn(6, 8, requires_grad=True)], wrap)


EAGER = ("eager",)
DEEP: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-4}  # sums of many products, in another order
BF16: dict[str, Any] = {"rtol": 5e-2, "atol": 5e-2}

CASES = [
    Case("graph_breaks", graph_breaks),
    Case("called_twice", called_twice, **DEEP, compilers=EAGER),
    Case("odd_outputs", odd_outputs),
    Case("unused_output", unused_output, reference="compiled", compilers=EAGER),
    Case("looped", looped, **DEEP),
    Case("no_grad", no_grad, plans=False, reference="compiled"),
    Case("autocast", autocast, **BF16),
    Case("compiled_autograd", compiled_autograd, **DEEP),
    Case("functional_transforms", functional_transforms, **DEEP),
]


def test_graphs(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


def error_of(run: Callable[[], Any]) -> tuple[type[BaseException], str]:
    with pytest.raises(Exception) as caught:
        run()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("budget", ["max", "min"])
def test_double_backward_is_refused_as_plain_compile_refuses_it(budget: str) -> None:
    def twice(backend: Any, **options: Any) -> None:
        torch.compiler.reset()
        x = torch.randn(4, 8, requires_grad=True)
        output = torch.compile(Looped(), backend=backend, **options)(x)
        (gradient,) = torch.autograd.grad(weighted_sum(output), x, create_graph=True)
        gradient.sum().backward()

    expected = error_of(lambda: twice(plain_eager()))
    assert "does not currently support double backward" in expected[1]
    assert error_of(lambda: twice(remat, options={"memory_budget": budget, "compiler": "eager"})) == expected


def test_every_graph_of_a_broken_program_is_planned() -> None:
    call = torch.compile(Broken(), backend=remat, options={"memory_budget": "min", "compiler": "eager"})
    for tensor in tensors_of(call(torch.randn(16, 8))):
        tensor.sum().backward()
    assert len([r for r in compile_remat.reports() if r.status != "NOT_PLANNED"]) == 2
