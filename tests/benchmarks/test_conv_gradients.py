"""The benchmark that compares gradients of convolutional models with float64's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import conv_gradients
from benchmarks.conv_gradients import GradientRow, verdicts
from benchmarks.models import normed


def test_verdicts_are_of_the_median_and_the_worst_seed() -> None:
    row = GradientRow("resnet", "float32", "", "all", 0, 1e-6, 1e-6, 1e-6, 1.0, 2.0, 10.0, 10.0)
    rows = [replace(row, seed=k, ratio=ratio) for k, ratio in enumerate((1.0, 1.5, 3.0))]
    assert verdicts(rows) == ["ok: resnet, float32, all: median 1.50, worst 3.00"]
    assert verdicts([*rows, replace(row, ratio=3.1)])[0].startswith("miss: ")
    assert verdicts([replace(row, ratio=ratio) for ratio in (1.0, 1.6, 1.6)])[0].startswith("miss: ")
    assert not verdicts([replace(row, setting="eager", ratio=9.0)])


class Cancelling(nn.Module):
    """`scale * ((w + 1000) - 1000)`: a change of what lies in the middle is one of 1,000 times that of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
        self.layer.requires_grad_(False)
        nn.init.ones_(self.layer.weight)
        nn.init.constant_(self.layer.bias, 1000.0)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.scale * (self.layer(x) - 1000.0)).sum()


def test_what_rounding_does_to_a_model() -> None:
    module, inputs = Cancelling(), (torch.ones(1, 1), torch.zeros(1))
    true = conv_gradients._in_float64(module, inputs)
    torch.testing.assert_close(true, [torch.ones(1, dtype=torch.float64)])
    changes = [conv_gradients._change(module, inputs, true, 1e-6, in_backward=b) for b in (False, True)]
    assert 1e-5 < changes[0] < 1e-3 and changes[1] < 1e-6


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::compile_remat.PlannerWarning")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    flags = [
        "--toy",
        "--compiler",
        "eager",
        "--model",
        "resnet",
        "--dtype",
        "float32",
        "--seeds",
        "3",
        "--json",
        str(out),
    ]
    settings = ["--setting", "no rewrites", "--setting", "all"]
    assert conv_gradients.main([*flags, *settings]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["plain"] * 3 + ["no rewrites"] * 3 + ["all"] * 3
    assert all(row["ratio"] == 1 and row["from_plain"] == 0 for row in rows if row["setting"] == "plain")
    assert max(row["ratio"] for row in rows) <= conv_gradients.WORST_LIMIT
    assert "ok: resnet, float32, all" in capsys.readouterr().out


@pytest.mark.parametrize("name", normed.FULL)
def test_models_train(name: str) -> None:
    torch.manual_seed(0)
    module = normed.TOY[name]()
    module(torch.randn(2, 3, 32, 32), torch.tensor([0, 1])).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
