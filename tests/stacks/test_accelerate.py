"""A loop with Accelerate: compiled by the user, or by Accelerate under `install`."""

from __future__ import annotations

import pytest
import torch

from tests.stacks.promise import assert_same, assert_within_budget, planned

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-stacks")

import accelerate_loop
from accelerate import Accelerator
from accelerate.state import AcceleratorState


def losses(budget: float | None, precision: str, *, install: bool = False) -> list[float]:
    torch.compiler.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate_loop.train(budget, precision=precision, install=install)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compiled_before_prepare(precision: str) -> None:
    expected = losses(None, precision)
    assert_same(losses(0.5, precision), expected, rel=2e-3 if precision == "bf16" else 1e-5)
    report = planned()[0]
    measured_bytes = report.measured_peak_bytes or 0
    if (
        precision == "bf16"
    ):  # Accelerate converts the output to float32 outside of the graph; that, the loss and their gradients
        measured_bytes -= 4 * 512 * torch.float32.itemsize
    assert_within_budget(measured_bytes, report.budget_bytes)


def test_install() -> None:
    expected = losses(None, "no")
    assert_same(losses(0.5, "no", install=True), expected)
    assert len(planned()) == 1


def test_a_backend_name_of_ours_is_no_name_of_theirs() -> None:
    with pytest.raises(ValueError, match="REMAT"):
        Accelerator(dynamo_backend="remat")
