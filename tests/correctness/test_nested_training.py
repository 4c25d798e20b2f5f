"""Training under plans that compute some values a third time: gradients, memory, pinned plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.api import look
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.passes import Planner

DEPTH, WIDTH, ROWS = 20, 16, 512


class Deep(nn.Module):
    """Layers so narrow that activations outweigh gradients; heads split and joined, a mask drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if k % 10 == 3:
                first, second = x.view(-1, 2, WIDTH // 2).unbind(1)
                x = torch.cat([torch.sin(second), first], dim=-1)
            if k == DEPTH // 2:
                x = self.drop(x)
        return x.square().mean()


pytestmark = pytest.mark.usefixtures("own_caches")


def trained(call: Any, model: nn.Module) -> list[Tensor]:
    """Gradients of two steps with other numbers drawn in each."""
    torch.manual_seed(1)
    found = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        call(torch.linspace(-1, 1 + step, ROWS * WIDTH).reshape(ROWS, WIDTH)).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.fixture(scope="module")
def floors() -> tuple[int, int]:
    """Lowest predicted peaks of `Deep`: of all plans, and of those that compute each value once more at most."""
    torch.manual_seed(0)
    model, x = Deep(), torch.zeros(ROWS, WIDTH)
    (planned,) = look(model, (x,), memory_budget="min")
    once = Planner(planned.problem).lowest(once=True)
    return planned.plan.peak_bytes, once.peak_bytes


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_gradients_and_peak(compiler: str, floors: tuple[int, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Deep()
    lowest_bytes, once_bytes = floors
    assert lowest_bytes < 0.97 * once_bytes
    expected = trained(
        torch.compile(model, backend=remat, options={"memory_budget": "max", "compiler": compiler}), model
    )
    torch.compiler.reset()
    options = {"memory_budget": "min", "compiler": compiler, "plan_dir": str(tmp_path / "plans")}
    call = torch.compile(model, backend=remat, options=options)
    torch.testing.assert_close(trained(call, model), expected, rtol=1e-4, atol=1e-7)
    report = compile_remat.reports()[-1]
    assert report.plan is not None and report.plan.again
    if compiler == "inductor":
        model.zero_grad(set_to_none=True)
        x = torch.ones(ROWS, WIDTH)
        measured = peak_bytes(lambda: call(x).backward(), "cpu").peak_bytes
        assert report.scheduled_peak_bytes is not None
        assert 0 <= measured - report.scheduled_peak_bytes <= 64  # the loss' gradient
        assert measured <= min(1.1 * report.plan.peak_bytes, once_bytes)
        return
    torch.compiler.reset()
    replayed = trained(torch.compile(model, backend=remat, options=options), model)
    torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-7)
    again = compile_remat.reports()[-1].plan
    assert again is not None and (again.saved, again.again) == (report.plan.saved, report.plan.again)
