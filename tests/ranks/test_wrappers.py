"""What DDP and FSDP2 hold beside graphs: by formula, by hand, and measured on gloo processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_remat._torch.ranks.wrappers import FsdpGroup
from compile_remat.ranks.wrappers import fsdp_moments, held_by, held_by_running
from tests.ranks import jobs
from tests.ranks.processes import Ranks


def group(nbytes: int, *, stays: bool = False, is_outer: bool = False) -> FsdpGroup:
    """Of two ranks, everything in one type."""
    return FsdpGroup(nbytes, nbytes, nbytes, nbytes // 2, nbytes // 2, stays=stays, is_outer=is_outer)


def most(groups: list[FsdpGroup]) -> tuple[int, int]:
    moments = list(fsdp_moments(groups))
    return max(beside for beside, _ in moments), max(beside + gradients for beside, gradients in moments)


@pytest.mark.parametrize(
    ("groups", "beside", "step"),
    [
        ([group(100)], 200, 250),  # gathered flat and copied out; reduced: gradients, input and output
        ([group(100, stays=True)], 200, 250),
        ([group(100)] * 4, 450, 500),  # the first: copied out, beside one being reduced and three shards
        ([group(100, stays=True)] * 4, 600, 600),  # four of them, and two more on the way
        ([group(40, stays=True, is_outer=True), group(100), group(100)], 390, 390),
        ([], 0, 0),
    ],
)
def test_moments_of_a_step(groups: list[FsdpGroup], beside: int, step: int) -> None:
    if groups:
        assert most(groups) == (beside, step)
    else:
        assert list(fsdp_moments(groups)) == []


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
