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
from transformers import Trainer

from compile_remat.integrations.transformers import MemoryCallback


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
    run.add_callback(callback := MemoryCallback(run))
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


def test_figures_stand_in_the_rows_of_the_losses_in_log_history_and_in_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: make test-stacks")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    run = hf_trainer.trainer(
        hf_trainer.llama(), 0.5, report_to=["tensorboard"], max_steps=5, gradient_accumulation_steps=1
    )
    run.add_callback(callback := MemoryCallback(run))
    run.train()
    figures = callback.report.figures()
    assert set(figures) == {"remat_measured_mib", "remat_predicted_mib", "remat_budget_mib", "remat_extra_share"}
    assert 0 < figures["remat_measured_mib"] <= figures["remat_budget_mib"]
    rows = [row for row in run.state.log_history if "loss" in row]
    logged = {row["step"]: {name: row[name] for name in figures if name in row} for row in rows}
    assert logged[1] == logged[2] == {} and logged[5] == figures  # the third call is the first measured one
    assert set(logged[3]) == set(logged[4]) == set(figures)  # of a batch that may be smaller than a later one
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    for name in figures:
        found = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert found == [(step, pytest.approx(logged[step][name])) for step in (3, 4, 5)]


def run_three_steps(callback: MemoryCallback | None = None, **arguments: Any) -> tuple[Trainer, MemoryCallback]:
    """Three steps, operator by operator."""
    model = hf_trainer.llama()
    run = hf_trainer.trainer(model, "min", max_steps=3, gradient_accumulation_steps=1, **arguments)
    model.compile(backend="remat", options={"memory_budget": 0.5, "compiler": "eager"})
    run.add_callback(callback := callback or MemoryCallback(run))
    run.train()
    return run, callback


def test_without_the_trainer_the_figures_reach_the_trainers_state_alone() -> None:
    run, callback = run_three_steps(MemoryCallback())
    last = [row for row in run.state.log_history if "loss" in row][-1]
    figures = callback.report.figures()
    assert figures["remat_measured_mib"] > 0
    assert {name: last[name] for name in figures} == figures


def test_the_progress_bar_shows_the_peak_beside_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    _, callback = run_three_steps(disable_tqdm=False)
    assert callback.report.postfix().startswith("peak ")
    assert callback.report.postfix() in capsys.readouterr().err


def test_the_smaller_last_batch_of_an_epoch_leaves_the_figures_to_a_full_one() -> None:
    """Steps of 8 and 8 rows, of 4 alone, and the same again: the second call has 4 rows, and the third one has 8."""
    model = hf_trainer.llama()
    run = hf_trainer.trainer(model, "min", max_steps=5)
    model.compile(backend="remat", dynamic=False, options={"memory_budget": 0.5, "compiler": "eager"})
    run.add_callback(callback := MemoryCallback(run, step=2))
    run.train()
    assert callback.report.batch == "input_ids 8 x 64"
    assert " at input_ids 8 x 64" in callback.report.text
    gradients = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    assert f"2 micro-batches in a step: from the second one on, {gradients:.1f} MiB of" in callback.report.text
    of_full, of_last = planned()
    assert of_last.measured_peak_bytes < of_full.measured_peak_bytes == callback.report.measured.peak_bytes
    assert "training_step" not in vars(run)
