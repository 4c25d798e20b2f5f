"""Memory that DDP and FSDP2 hold beside graphs: by formula, and measured on gloo processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_remat.ranks.wrappers import held_by, held_by_running
from tests.ranks import jobs
from tests.ranks.processes import Ranks


def test_a_model_under_no_wrapper_holds_nothing() -> None:
    assert held_by(nn.Linear(2, 2)) is None
    assert held_by_running() is None


@pytest.mark.parametrize(
    ("wrapper", "stays", "dtype"),
    [
        ("ddp", None, None),
        ("whole", True, None),
        ("whole", False, torch.bfloat16),
        ("blocks", True, None),
        ("blocks", False, None),
    ],
)
def test_the_formula_is_what_is_measured(
    two: Ranks, wrapper: str, stays: bool | None, dtype: torch.dtype | None
) -> None:
    for found in two(jobs.measured_wrapper, wrapper, stays, dtype):
        assert found.predicted.step_bytes == pytest.approx(found.least, rel=0.03)
        assert found.coming and all(0 <= nbytes <= found.predicted.beside_bytes for nbytes in found.coming)
        if wrapper != "ddp":
            assert max(found.coming) < found.predicted.beside_bytes  # parameters of the running block are there
