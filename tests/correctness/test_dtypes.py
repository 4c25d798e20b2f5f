"""Types: scalars and tensors without a dimension, complex, integers, bools, half precision, float8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from compile_remat.backend import remat
from tests.correctness.harness import Case, Observed, Wrap, check, train, weighted_sum


class Scalars(nn.Module):
    """Parameters, inputs and results without a dimension, of float32 and float64."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(x * self.gain) * t + self.shift
        norm = torch.sqrt((torch.sin(h) ** 2).sum() + 1)
        return torch.sin(h / norm), torch.exp(norm * self.gain), norm * t


def scalars(wrap: Wrap) -> Observed:
    return train(Scalars(), [torch.randn(9, requires_grad=True), torch.tensor(0.7, requires_grad=True)], wrap)


class Complex(nn.Module):
    """Complex parameters, products, Fourier transforms and views as reals."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64) / 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.polar(torch.sigmoid(x), torch.sin(x)) @ self.weight
        z = z * z.conj() + torch.sin(z) * 1j
        spectrum = torch.fft.rfft(torch.sin(z.real), dim=-1) * self.filter
        y = torch.fft.irfft(spectrum * spectrum, n=8, dim=-1)
        return torch.view_as_real(z) ** 2, torch.sin(y), torch.fft.fft2(z * y).abs() + torch.angle(z + 2), z


def complex_numbers(wrap: Wrap) -> Observed:
    return train(Complex(), [torch.randn(6, 8, requires_grad=True)], wrap, learning_rate=1e-4)


class Integers(nn.Module):
    """Token ids, masks and results that are no floats."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(self.layer(self.tokens(ids % 11)))
        h = torch.where(mask[:, None], h, -h * (ids // 3)[:, None]).masked_fill(~mask[:, None] & (h > 0), 0.5)
        bits = (ids ^ 5).to(torch.uint8) << 1
        return torch.sin(h) * torch.exp(h), h.argmax(-1), mask ^ (ids > 3), bits, h * F.one_hot(ids % 8, 8)


def integers_and_bools(wrap: Wrap) -> Observed:
    return train(Integers(), [torch.arange(14), torch.arange(14) % 3 > 0], wrap)


class Layers(nn.Module):
    """A few layers whose every part runs in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=dtype) for _ in range(3)])
        self.norm = nn.LayerNorm(8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.norm(torch.sin(layer(x)) * torch.sigmoid(x))
        return F.softmax(x, -1) * F.gelu(x)


def dtype_of(dtype: torch.dtype) -> Callable[[Wrap], Observed]:
    def run(wrap: Wrap) -> Observed:
        return train(Layers(dtype), [torch.randn(16, 8, dtype=dtype)], wrap, loss=lambda y: weighted_sum(y) / 16)

    return run


class Float8(nn.Module):
    """Activations and weights rounded to float8 on the way, as in quantised training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(F.linear(Rounded.apply(x), Rounded.apply(layer.weight), layer.bias))
        return x * x.to(torch.float8_e4m3fn).to(torch.float32)


class Rounded(torch.autograd.Function):
    """To float8 and back, scaled by the largest element; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 448
        small = (x / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(small, scale)
        return small.to(torch.float32) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        small, scale = ctx.saved_tensors
        return gradient * torch.where(small.to(torch.float32).abs() < 448, 1.0, 0.5) * torch.sign(scale)


def float8(wrap: Wrap) -> Observed:
    return train(Float8(), [torch.randn(16, 8)], wrap)


EAGER = ("eager",)

# Plain Inductor of torch 2.11 compiles none of it: 'complex' object has no attribute 'get_name'.
COMPLEX = EAGER if TorchVersion(torch.__version__) < (2, 12) else ("eager", "inductor")

CASES = [
    Case("scalars", scalars, compilers=EAGER),
    Case("complex", complex_numbers, rtol=1e-4, atol=1e-4, compilers=COMPLEX),
    Case("integers_and_bools", integers_and_bools, compilers=EAGER),
    Case("float16", dtype_of(torch.float16), compilers=EAGER, rtol=1e-2, atol=2e-2),
    Case("bfloat16", dtype_of(torch.bfloat16), rtol=0.1, atol=0.1),
    Case("float8", float8),
]


def test_dtypes(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


def test_a_maximum_in_bfloat16_has_a_gradient_where_its_operand_would_be_computed_again() -> None:
    """Of each row the equal elements share a gradient of 1; those computed again in float32 would equal no rounded maximum."""
    torch.manual_seed(0)
    x = torch.randn(64, 40, dtype=torch.bfloat16, requires_grad=True)
    call = torch.compile(lambda x: (x * 3 + 0.1).amax(1), backend=remat, options={"memory_budget": "min"})
    call(x).backward(torch.ones(64, dtype=torch.bfloat16))
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float().sum(1), torch.full((64,), 3.0), rtol=0.02, atol=0.0)
