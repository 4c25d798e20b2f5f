"""TRL's SFTTrainer, at toy size."""

from __future__ import annotations

import pytest
import torch

from tests.stacks.promise import assert_same, assert_within_budget, planned

pytest.importorskip("trl", reason="trl is not installed: make test-stacks")

import trl.trainer.utils
import trl_sft

from compile_remat.integrations.transformers import MemoryCallback

pytestmark = pytest.mark.full

STEP_BUFFER = 4 * 63 * 32768 * 4
"""Bytes that TRL's loss holds beside the plans: a row of 32,768 float32 for each token, the last of a sequence has no label."""


def test_the_models_own_loss_is_inside_the_plan() -> None:
    plain = trl_sft.trainer(None, own_loss=True)
    plain.train()
    torch.compiler.reset()
    run = trl_sft.trainer(0.6, own_loss=True)
    run.add_callback(callback := MemoryCallback(run))
    run.train()
    assert_same(trl_sft.losses(run), trl_sft.losses(plain))
    first = planned()[0]
    assert_within_budget(first.measured_peak_bytes, first.budget_bytes)
    last = [row for row in run.state.log_history if "loss" in row][-1]
    assert {name: last[name] for name in callback.report.figures()} == callback.report.figures()


@pytest.mark.skipif(not hasattr(trl.trainer.utils, "add_fused_lm_head"), reason="this trl has no such loss")
def test_trls_loss_is_outside_of_the_plans() -> None:
    plain = trl_sft.trainer(None)
    plain.add_callback(of_plain := MemoryCallback(plain))
    plain.train()
    torch.compiler.reset()
    run = trl_sft.trainer(0.5)
    run.add_callback(of_ours := MemoryCallback(run))
    run.train()
    assert_same(trl_sft.losses(run), trl_sft.losses(plain))
    assert len(set(of_ours.report.measured.ran)) == 2
    for callback in (of_plain, of_ours):
        assert (callback.report.measured.peak_bytes or 0) > STEP_BUFFER
