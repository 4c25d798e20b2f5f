"""Narrow forms as a part of the plan: when there are any, what is said of them, the same bits with and without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compile_remat import Plan, explain, measured_step, reports, reset_reports
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import load_device
from compile_remat.errors import PlannerWarning
from compile_remat.planning.partitioner import RematPartitioner
from compile_remat.planning.settings import Settings
from compile_remat.runtime.process_state import clear_process_state
from tests.narrowable_models import ROWS, WIDTH, Dropouts, Maxima, batch


def plan_of(memory_budget: Any, narrow: str = "auto", model: nn.Module | None = None, **settings: Any) -> Plan:
    plan = explain(model or Dropouts(), batch(), memory_budget=memory_budget, narrow=narrow, **settings).plan
    assert plan is not None
    return plan


def test_masks_are_saved_as_bits_where_that_is_faster() -> None:
    whole, narrow = plan_of(0.6, "off"), plan_of(0.6)
    assert narrow.narrowed and not whole.narrowed
    assert {f"{name}_narrow" for name in narrow.narrowed} <= set(narrow.saved)
    assert narrow.peak_bytes <= (narrow.budget_bytes or 0)
    assert narrow.extra_time_ns < whole.extra_time_ns
    report = explain(Dropouts(), batch(), memory_budget=0.6, narrow="auto")
    assert f"saved narrow    {len(narrow.narrowed)} tensors, " in str(report) and report.spared_bytes > 0
    assert dict(report.figures().facts)["saved narrow"].startswith(f"{len(narrow.narrowed)} tensors, ")
    assert "narrowed" in str(narrow)


def test_masks_are_saved_as_bits_where_that_is_lower() -> None:
    assert plan_of("min").peak_bytes < plan_of("min", "off").peak_bytes


@pytest.mark.parametrize("budget", ["max", "64MiB"])
def test_where_nothing_is_recomputed_nothing_changes(budget: str) -> None:
    whole, asked = plan_of(budget, "off"), plan_of(budget)
    assert asked == whole and not asked.narrowed


def gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    torch.compiler.reset()
    reset_reports()
    step = torch.compile(model, backend="remat", options=options)
    torch.manual_seed(1)
    step(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("width", "rows"), [pytest.param(WIDTH, ROWS, marks=pytest.mark.proof), (37, 301)])
def test_gradients_have_the_same_bits(width: int, rows: int) -> None:
    found = {}
    for narrow in ("off", "auto"):
        options = {"memory_budget": 0.6, "compiler": "eager", "narrow": narrow}
        found[narrow] = gradients(Dropouts(width), batch(width, rows), **options)
    plan = reports()[-1].plan
    assert plan is not None and plan.narrowed
    assert all(torch.equal(a, b) for a, b in zip(found["off"], found["auto"], strict=True))


@pytest.mark.parametrize("model", [Dropouts, pytest.param(Maxima, marks=pytest.mark.full)])
def test_inductor_gives_the_same_bits_within_the_predicted_peak(model: type[nn.Module]) -> None:
    budget = 0.5 if model is Maxima else 0.6
    found = {}
    for narrow in ("off", "auto"):
        found[narrow] = gradients(model(), batch(), memory_budget=budget, narrow=narrow)
    made, x = model(), batch()
    step = torch.compile(made, backend="remat", options={"memory_budget": budget, "narrow": "auto"})
    step(x).backward()
    made.zero_grad(set_to_none=True)
    with measured_step():
        step(x).backward()
    report = reports()[-1]
    assert report.plan is not None and report.plan.narrowed and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= 1.01 * report.plan.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(found["off"], found["auto"], strict=True))


def test_dynamic_sizes_have_no_narrow_form() -> None:
    x = batch()
    torch._dynamo.mark_dynamic(x, 0)
    found = explain(Dropouts(), x, memory_budget="min", narrow="auto")
    assert found.plan is not None and not found.plan.narrowed


def test_a_pinned_plan_is_replayed(tmp_path: Path) -> None:
    plan = plan_of(0.6, plan_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.plan.json")
    assert Plan.from_json(file.read_text()).narrowed == plan.narrowed
    again = plan_of(0.6, plan_dir=str(tmp_path))
    assert (again.narrowed, again.saved, again.peak_bytes) == (plan.narrowed, plan.saved, plan.peak_bytes)
    assert again.status.name == "REPLAYED"


@pytest.mark.usefixtures("empty_kernels")
def test_what_comes_out_of_the_cache_says_no_more_than_the_compilation_did() -> None:
    for is_cached in (False, True):
        torch.compiler.reset()
        clear_process_state()
        step = torch.compile(Dropouts(), backend="remat", options={"memory_budget": "min", "narrow": "auto"})
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlannerWarning)
            step(batch()).backward()
        (report,) = reports()
        assert report.from_cache == is_cached and report.spared_bytes > 0 and not report.message


def test_the_setting_is_in_the_key_of_what_is_compiled() -> None:
    keys = {
        RematPartitioner(Settings(MemoryBudget("min"), load_device("cpu"), narrows=narrows)).uuid()
        for narrows in (True, False)
    }
    assert len(keys) == 2
