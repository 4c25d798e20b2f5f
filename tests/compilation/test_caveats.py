"""Cases in which a budget may not hold: a status in the report, and one warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.compilation.caveats import UNFUSED
from compile_remat.device.measure import peak_bytes
from compile_remat.errors import PlannerWarning

BUDGET = 1 << 20


def model() -> nn.Module:
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(128, 128), nn.GELU())])


def step(call: Any, rows: int = 256) -> None:
    call.zero_grad(set_to_none=True)
    call(torch.ones(rows, 128)).square().mean().backward()


def said_of(budget: object, compiler: str = "eager") -> list[str]:
    """Three calls of two equal models in one process, which Dynamo makes two graphs of."""
    options = {"memory_budget": budget, "compiler": compiler}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in ((256,), (256, 200)):
            call = torch.compile(model(), backend=remat, options=options)
            for n in rows:
                step(call, n)
    return [str(w.message) for w in seen if w.category is PlannerWarning]


def test_a_budget_that_is_run_unfused_is_said_once_and_in_every_row(own_caches: Path) -> None:
    (text,) = said_of(BUDGET)
    assert text == f"compile_remat: memory_budget may not hold, because {UNFUSED}"
    found = compile_remat.reports()
    assert len(found) == 2 and {report.status for report in found} == {"NOT_MODELLED"}
    call = torch.compile(model(), backend=remat, options={"memory_budget": BUDGET, "compiler": "eager"})
    step(call)
    x = torch.ones(256, 128)
    call.zero_grad(set_to_none=True)
    assert peak_bytes(lambda: call(x).backward(x), "cpu").peak_bytes > BUDGET  # true
    call.zero_grad(set_to_none=True)
    with compile_remat.measured_step():
        call(x).backward(x)
    report = compile_remat.reports()[-1]
    assert report.measured_peak_bytes and report.predicted_peak_bytes
    assert report.measured_peak_bytes > BUDGET >= report.predicted_peak_bytes, "as the warning says"


@pytest.mark.parametrize("budget", ["max", "min", "auto"])
def test_without_bytes_to_exceed_nothing_is_said(budget: str, own_caches: Path) -> None:
    assert not said_of(budget)
    assert {report.caveat for report in compile_remat.reports()} == {UNFUSED if budget == "min" else ""}


def test_inductors_plans_have_no_such_row(empty_kernels: None) -> None:
    assert not said_of(BUDGET, "inductor")
    assert {report.caveat for report in compile_remat.reports()} == {""}
