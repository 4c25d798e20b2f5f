"""Memory that an operator takes beside its outputs if its operands are lazily conjugated or negated, or not contiguous."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat._torch.operators import Like, lazily
from compile_remat._torch.sizes import storage_nbytes
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor.workspace import workspace_bytes

aten = torch.ops.aten

SIZE = 64
EYE = torch.eye(SIZE)
"""Keeps matrices that are factorised far from singular."""

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "conjugated": lambda x: torch._conj(x) if x.is_complex() else x,
    "negated": torch._neg_view,
    "both": lambda x: torch._neg_view(torch._conj(x)) if x.is_complex() else torch._neg_view(x),
    "conjugated and transposed": lambda x: x.mH,
    "transposed": lambda x: x.mT,
    "expanded": lambda x: x[0].expand(SIZE, SIZE),
    "one number": lambda x: x[0, 0].expand(SIZE, SIZE),
    "overlapping": lambda x: x.flatten()[: 8 * SIZE].unfold(0, SIZE, 7)[:SIZE],
    "every second": lambda x: x.repeat(1, 2)[:, ::2],
}


def _of(target: Any, *others: Any, **kwargs: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: (target, (x, *others), kwargs)


def _with(target: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: (target, (x, torch.ones(SIZE, SIZE, dtype=x.dtype)), {})


def _kernel(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(4, 1, 3, 3, dtype=x.dtype)


HOW = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
"""Stride, padding, dilation, transposed, output padding and groups of a convolution."""

REAL = torch.float32, torch.bfloat16
COMPLEX = (torch.complex64,)
BOTH = torch.float32, torch.complex64
OPERATORS: dict[str, tuple[tuple[torch.dtype, ...], Callable[[torch.Tensor], Any]]] = {
    "mul": (BOTH, _with(aten.mul.Tensor)),
    "add": (BOTH, _with(aten.add.Tensor)),
    "mm": ((*REAL, *COMPLEX), _with(aten.mm.default)),
    "mm with itself": ((*REAL, *COMPLEX), lambda x: (aten.mm.default, (x, x), {})),
    "addmm": ((*REAL, *COMPLEX), lambda x: (aten.addmm.default, (x[0], torch.ones(SIZE, SIZE, dtype=x.dtype), x), {})),
    "bmm": ((*REAL, *COMPLEX), lambda x: (aten.bmm.default, (x[None], torch.ones(1, SIZE, SIZE, dtype=x.dtype)), {})),
    "baddbmm": (BOTH, lambda x: (aten.baddbmm.default, (x[None], x[None], x[None]), {})),
    "dot": (BOTH, lambda x: (aten.dot.default, (x[0], torch.ones(SIZE, dtype=x.dtype)), {})),
    "sum": (BOTH, _of(aten.sum.dim_IntList, [0])),
    "exp": (BOTH, _of(aten.exp.default)),
    "abs": (BOTH, _of(aten.abs.default)),
    "cumsum": (BOTH, _of(aten.cumsum.default, 0)),
    "cat": (BOTH, lambda x: (aten.cat.default, ([x, x],), {})),
    "clone": (BOTH, _of(aten.clone.default)),
    "a copy of another type": (COMPLEX, lambda x: (aten._to_copy.default, (x,), {"dtype": torch.complex128})),
    "a copy into another tensor": (BOTH, lambda x: (aten.copy_.default, (torch.ones(SIZE, SIZE, dtype=x.dtype), x), {})),
    "index_select": (BOTH, _of(aten.index_select.default, 0, torch.arange(SIZE))),
    "index_put": (BOTH, lambda x: (aten.index_put.default, (x, [torch.arange(SIZE)], x, True), {})),
    "a transform": (COMPLEX, _of(aten._fft_c2c.default, [0, 1], 0, True)),
    "a transform to real numbers": (COMPLEX, _of(aten._fft_c2r.default, [1], 2, SIZE)),
    "an inverse": (BOTH, lambda x: (aten.linalg_inv_ex.default, (x,), {})),
    "a system's solution": (BOTH, _with(aten._linalg_solve_ex.default)),
    "a triangular system's": (BOTH, lambda x: (aten.linalg_solve_triangular.default, (x, x), {"upper": True})),
    "a factorisation": (BOTH, _of(aten.linalg_qr.default)),
    "sort": (REAL, _of(aten.sort.default)),
    "kthvalue": (REAL, _of(aten.kthvalue.default, 3)),
    "topk": (REAL, _of(aten.topk.default, 5)),
    "distances": ((torch.float32,), lambda x: (aten._cdist_forward.default, (x, x, 2.0, None), {})),
    "a convolution": (REAL, lambda x: (aten.convolution.default, (x[None, None], _kernel(x), None, *HOW), {})),
    "its gradients": (
        REAL,
        lambda x: (
            aten.convolution_backward.default,
            (x.expand(1, 4, SIZE, SIZE), x[None, None], _kernel(x), [4], *HOW, [True] * 3),
            {},
        ),
    ),
    "attention": (
        REAL,
        lambda x: (aten._scaled_dot_product_flash_attention_for_cpu.default, (x[None, None],) * 3, {}),
    ),
}  # fmt: skip


def _cases() -> list[tuple[str, torch.dtype]]:
    return [(name, dtype) for name, (dtypes, _) in OPERATORS.items() for dtype in dtypes]


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize(("name", "dtype"), _cases())
def test_operators_take_what_the_allocator_sees_whatever_their_operands(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # before each peak; nothing here is garbage in cycles
    memory, make, wrong = (torch.randn(SIZE, SIZE) + 2 * SIZE * EYE).to(dtype), OPERATORS[name][1], {}
    for kind, view in VIEWS.items():
        target, args, kwargs = make(view(memory))
        found = workspace_bytes(target, args, kwargs)
        try:
            target(*args, **kwargs)
        except RuntimeError:  # a singular matrix: nothing to measure
            continue
        measured = peak_bytes(lambda: target(*args, **kwargs), "cpu")  # noqa: B023 - called here
        if found != measured.peak_bytes - measured.end_bytes:
            wrong[kind] = found, measured.peak_bytes - measured.end_bytes
    assert not wrong


def test_a_tensor_of_zeros_without_memory_is_none() -> None:
    zero = torch._efficientzerotensor((SIZE, SIZE))
    assert storage_nbytes(zero) == Like.of(zero).nbytes == 0
    assert lazily(Like.of(zero).over(torch.empty(0))) == ("zero",)


# -- whole models -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Complex attention: scores of queries and conjugated, transposed keys."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 64, 64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, h = torch.view_as_complex(self.weight), torch.complex(x, -x)
        for _ in range(2):
            query, key, value = (h @ weight for weight in weights)
            h = (query @ key.mH).abs().softmax(-1).to(value.dtype) @ value
        return torch.view_as_real(h).square().mean()


class Kernel(nn.Module):
    """The kernel of a diagonal state space model: a product that Inductor turns into a multiplication of a conjugated operand."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.phase = (nn.Parameter(torch.rand(64, 16)) for _ in range(2))
        self.weight = nn.Parameter(torch.rand(64, 16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates = torch.complex(-self.decay.exp(), self.phase)
        powers = torch.exp(rates[..., None] * torch.arange(256) * 0.01)
        kernel = torch.einsum("hn,hnl->hl", torch.view_as_complex(self.weight), powers).real
        return (kernel * x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "attention": (Attention, lambda: torch.randn(4, 128, 64)),
    "a state space model's kernel": (Kernel, lambda: torch.randn(8, 64, 256)),
}


@pytest.mark.usefixtures("own_caches", "empty_kernels")
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full if name == "attention" else []) for name in MODELS],
)
def test_a_step_takes_what_the_dry_run_says(name: str) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), draw()
    step = torch.compile(model, backend=remat, options={"memory_budget": "min"})
    step(x).backward()
    model.zero_grad()
    measured = peak_bytes(lambda: step(x).backward(), "cpu").peak_bytes
    (report,) = compile_remat.reports()
    gradient_bytes = 4  # of the loss, which autograd makes
    assert report.scheduled_peak_bytes is not None
    assert measured - gradient_bytes <= report.scheduled_peak_bytes <= measured


class Zeros(nn.Module):
    """Forward mode hands tensors of zeros on that have no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero, h = torch._efficientzerotensor((64, 64)), (x @ self.first).tanh()
        return ((zero.t() @ h + h).tanh() @ self.second + zero).square().mean()


@pytest.mark.usefixtures("own_caches", "empty_kernels")
@pytest.mark.parametrize("budget", ["max", pytest.param(0.9, marks=pytest.mark.full)])
def test_zeros_without_memory_are_not_saved(budget: str | float) -> None:
    """Inductor cannot compile a backward that gets a tensor without memory."""
    step = torch.compile(Zeros(), backend=remat, options={"memory_budget": budget})
    step(torch.randn(64, 64)).backward()
    (report,) = compile_remat.reports()
    assert report.plan is not None and not [name for name in report.plan.saved if "zerotensor" in name]
