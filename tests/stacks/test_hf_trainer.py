"""The Hugging Face Trainer, Accelerate and PEFT with their own training loops, at toy size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.stacks.promise import assert_same, assert_within_budget, planned

pytest.importorskip("transformers", reason="transformers is not installed: make test-stacks")
pytest.importorskip("accelerate", reason="accelerate is not installed: make test-stacks")

import hf_trainer


def losses(budget: str | float | None, **arguments: Any) -> list[float]:
    torch.compiler.reset()
    run = hf_trainer.trainer(hf_trainer.llama(), budget, **arguments)
    run.train()
    return hf_trainer.losses(run)


def test_accumulation_evaluation_a_smaller_last_batch_and_a_checkpoint(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    expected = losses(None, **arguments)
    assert len(expected) == 6  # four steps, two evaluations
    saving = {**arguments, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "out")}
    torch.compiler.reset()
    run = hf_trainer.trainer(hf_trainer.llama(), 0.5, **saving)
    run.add_callback(callback := hf_trainer.MemoryCallback())
    run.train()
    assert_same(hf_trainer.losses(run), expected)
    assert len(planned()) == 3  # batches of 8, then of 4, then of any size up to a size class
    first = planned()[0]
    # The third step runs a plan for a size class: its bytes are half of plain's at that class.
    assert_within_budget(callback.report.measured.peak_bytes, max(report.budget_bytes or 0 for report in planned()))
    assert first.plain is not None and first.budget_bytes == first.plain.peak_bytes // 2
    assert f"{callback.report.measured.peak_bytes / 2**20:.1f} MiB" in callback.report.text

    torch.compiler.reset()
    resumed = hf_trainer.trainer(hf_trainer.llama(), 0.5, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert_same(hf_trainer.losses(resumed), expected)


def test_bf16_and_gradient_checkpointing() -> None:
    """Half of the peak under the model's checkpoints may lie below the lowest peak, so the budget is `min`."""
    arguments: dict[str, Any] = {"bf16": True, "gradient_checkpointing": True, "max_steps": 2}
    expected = losses(None, **arguments)
    assert_same(losses("min", **arguments), expected, rel=2e-3)
    assert planned()[0].budget == "min"


@pytest.mark.parametrize("bf16", [False, True])
def test_install(bf16: bool) -> None:
    expected = losses(None, bf16=bf16, max_steps=2)
    found = losses(0.5, install=True, bf16=bf16, max_steps=2)
    assert_same(found, expected, rel=2e-3 if bf16 else 1e-5)
    assert planned()


def test_rows_of_the_logits_are_in_slices_where_the_graph_returns_the_loss_alone() -> None:
    """Two batches in a step, and an evaluation that asks for logits."""
    arguments: dict[str, Any] = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    expected = losses(None, **arguments)
    assert len(expected) == 2
    assert_same(losses("min", slices="8", **arguments), expected)
    (report,) = planned()
    assert report.plan is not None and ("mm", 8) in {
        (p.name.rstrip("_0123456789"), p.slices) for p in report.plan.sliced
    }
    assert "logits are an output" not in report.message


def test_logits_that_the_model_returns_are_named_as_what_is_in_the_way() -> None:
    model = hf_trainer.llama()
    run = hf_trainer.trainer(model, "min", max_steps=1)
    model.compile(backend="remat", options={"memory_budget": "min", "slices": "auto", "compiler": "eager"})
    run.train()
    assert "logits are an output: 512.0 KiB cannot be sliced; return the loss alone" in planned()[0].message


def test_lora() -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-stacks")
    found = []
    for arguments in (["--plain", "--lora"], ["--budget", "0.6", "--lora"]):
        torch.compiler.reset()
        found.append(hf_trainer.main(arguments))
    assert_same(found[1], found[0])
    measured = [report for report in planned() if report.measured_peak_bytes]
    assert measured
    for report in measured:
        assert_within_budget(report.measured_peak_bytes, report.budget_bytes)
