"""The setting `inputs` through planning: doors, plan files, errors, reports."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_remat import BudgetError, explain, pareto, plan
from compile_remat.api import look
from compile_remat.errors import PlannerWarning
from compile_remat.passes import Problem
from compile_remat.passes.problem.constant_inputs import has_snapshots


def model(layers: int = 3, width: int = 64) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())])


def frozen_stem() -> nn.Module:
    """The batch is read by the stem alone, which needs no gradient: with snapshots its floor is higher."""
    return nn.Sequential(model(1).requires_grad_(False), model())


X = torch.randn(2048, 64)
EAGER = {"memory_budget": "min", "compiler": "eager"}
"""Plans are not lowered: the setting is about what is planned."""


def problem_of(**settings: Any) -> Problem:
    (planned,) = look(model(), (X,), memory_budget="min", **settings)
    return planned.problem


def test_only_plain_inputs_have_no_snapshots() -> None:
    assert has_snapshots(problem_of())
    assert not has_snapshots(problem_of(inputs="constant"))


@pytest.mark.parametrize("slices", ["off", "2"])
@pytest.mark.parametrize("gradients", ["end", "early"])
def test_it_holds_with_slices_and_early_gradients(slices: str, gradients: str) -> None:
    assert has_snapshots(problem_of(slices=slices, gradients=gradients))


def test_every_door_knows_the_setting() -> None:
    lower = {value: plan(frozen_stem(), X, inputs=value, **EAGER) for value in ("constant", "as_plain")}
    assert lower["constant"].peak_bytes < lower["as_plain"].peak_bytes
    ends = {value: pareto(frozen_stem(), X, points=3, inputs=value)[-1] for value in lower}
    assert ends["constant"].peak_bytes < ends["as_plain"].peak_bytes
    found = {
        value: plan("tests.planned_models:attention", device="h100-sxm", seq=64, memory_budget="min", inputs=value)
        for value in lower
    }
    assert not any("snapshot" in name for name in found["constant"].saved)


def test_a_report_counts_snapshots_and_explain_says_what_constant_brings() -> None:
    found = explain(frozen_stem(), X, **EAGER)
    assert found.num_snapshots
    assert found.snapshot_bytes > 0
    assert "input snapshots" in str(found)
    assert 'with inputs="constant" the peak would be' in found.message
    constant = explain(frozen_stem(), X, inputs="constant", **EAGER)
    assert (constant.num_snapshots, constant.snapshot_bytes, constant.message) == (0, 0, "")


def test_an_error_names_the_floor_of_constant_inputs() -> None:
    floors = {value: explain(frozen_stem(), X, inputs=value, **EAGER).floor_bytes for value in ("constant", "as_plain")}
    with pytest.raises(BudgetError) as caught:
        torch.compile(frozen_stem(), backend="remat", options={"memory_budget": "1MiB", "compiler": "eager"})(X)
    assert caught.value.floor_bytes == floors["as_plain"]
    assert caught.value.constant_floor_bytes == floors["constant"]
    assert f'With inputs="constant" it is {floors["constant"] / 2**20:.1f} MiB' in str(caught.value)


def test_a_plan_that_was_pinned_for_constant_inputs_is_not_replayed(tmp_path: Path) -> None:
    explain(model(), X, plan_dir=str(tmp_path), inputs="constant", **EAGER)
    (old,) = tmp_path.iterdir()
    with pytest.warns(PlannerWarning, match=f"{old.name} is not replayed"):
        explain(model(), X, plan_dir=str(tmp_path), **EAGER)
    assert len(list(tmp_path.iterdir())) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlannerWarning)
        again = explain(model(), X, plan_dir=str(tmp_path), **EAGER)
        constant = explain(model(), X, plan_dir=str(tmp_path), inputs="constant", **EAGER)
    assert again.status == constant.status == "REPLAYED"
