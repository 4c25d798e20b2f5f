"""The base of a fractional budget: the observed peak of plain torch.compile against the code that plain Inductor emits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common.code_only import plain_peak_bytes, without_compiler
from compile_remat.api import explain, look
from compile_remat.runtime.process_state import clear_process_state
from tests.compilation.test_predicted_peaks import Fan


class Pooled(nn.Module):
    """A pooling between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 16, H, W] -> scalar"""
        return F.relu(self.second(F.avg_pool2d(self.first(x), 2))).sum()


class Scattered(nn.Module):
    """Messages along edges, added up at their ends; the masks of the activations are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("begin", torch.randint(0, 1024, (2048,)))
        self.register_buffer("end", torch.randint(0, 1024, (2048,)))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 64] -> scalar"""
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, self.end, F.relu(layer(x[self.begin]))).tanh()
        return x.pow(2).mean()


class Overwritten(nn.Module):
    """A large buffer that the forward writes into; plain torch.compile does not save what read it before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.register_buffer("mean", torch.zeros(2048, 128))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 128] -> scalar"""
        for layer in self.layers:
            x = F.relu(layer(x))
            self.mean.mul_(0.9).add_(x.detach())
            x = x * self.mean.clone().tanh()
        return x.mean()


class Checkpointed(nn.Module):
    """Checkpointed MLPs: buffers of the first one that the backward computes again are kept for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(128) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(128, 256) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(256, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 128] -> scalar"""
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = checkpoint(lambda x, f=(norm, up, down): x + f[2](F.gelu(f[1](f[0](x)))), x, use_reentrant=False)
        return x.mean()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Scattered, (1024, 64)),
        (Fan, (2048, 128)),
        (Overwritten, (2048, 128)),
        (Checkpointed, (2048, 128)),
    ],
)
def test_the_peak_of_plain_is_that_of_its_code(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(*shape),)
    clear_process_state()
    plain = explain(make(), *inputs, memory_budget=0.9).plain
    torch.compiler.reset()
    with without_compiler():
        emitted_bytes = plain_peak_bytes(make(), inputs)
    assert plain is not None and emitted_bytes is not None
    assert plain.peak_bytes == emitted_bytes


def test_plain_saves_what_a_pooling_reads() -> None:
    """A pooling's backward reads the input for its size alone: plain torch.compile saves the input, our plans save nothing."""
    seen = look(Pooled(), (torch.randn(4, 16, 32, 32),), memory_budget=0.99)[0]
    assert seen.report.plain is not None
    assert "convolution" in seen.report.plain.saved and "convolution" not in seen.plan.saved


def test_what_stays_inside_two_kernels_may_be_read_by_the_earlier_one() -> None:
    """The gradient of the `tanh` reads the softmax's difference, which is computed after it; neither value has a buffer."""

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(F.leaky_relu(x, 0.1)), torch.tanh(F.log_softmax(x, -1))

    report = explain(step, torch.randn(64, 40, requires_grad=True), memory_budget=0.5)
    assert report.plain is not None and report.plain.peak_bytes > 0
