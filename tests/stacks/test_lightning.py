"""Lightning's Trainer and Fabric with their own loops, at toy size."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from tests.stacks.promise import assert_same, assert_within_budget, planned

pytest.importorskip("lightning", reason="lightning is not installed: make test-stacks")

import lightning_trainer
from lightning import Fabric
from lightning.fabric.loggers import CSVLogger as FabricLogger
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from compile_remat.integrations import MemoryReport
from compile_remat.integrations.lightning import MemoryCallback


def test_clipping_accumulation_validation_and_a_checkpoint(tmp_path: Path) -> None:
    expected = lightning_trainer.fit(None, enable_checkpointing=False)
    torch.compiler.reset()
    callback = MemoryCallback()
    kept = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    assert_same(lightning_trainer.fit(0.5, [callback, kept]), expected)
    first = planned()[0]
    assert_within_budget(callback.report.measured.peak_bytes, first.budget_bytes)
    assert f"predicted peak {first.plan.peak_bytes / 2**20:.1f} MiB" in callback.report.text
    assert "2 micro-batches in a step" in callback.report.text

    torch.compiler.reset()
    resumed = lightning_trainer.fit(0.5, ckpt_path=str(tmp_path / "epoch=0.ckpt"), enable_checkpointing=False)
    assert_same(resumed[-5:], expected[-5:])  # the second epoch: four batches, one of validation


def test_figures_stand_in_the_rows_of_the_losses(tmp_path: Path) -> None:
    callback = MemoryCallback()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    lightning_trainer.fit(0.5, [callback], logger=logger, log_every_n_steps=1, accumulate_grad_batches=1, max_epochs=1)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    figures = callback.report.figures()
    assert len(figures) == 4 and 0 < figures["remat_measured_mib"] <= figures["remat_budget_mib"]
    assert [bool(row["remat_measured_mib"]) for row in rows] == [False, False, True, True]
    assert {name: float(rows[2][name]) for name in figures} == pytest.approx(figures)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(precision: str) -> None:
    expected = lightning_trainer.fabric_loop(None, precision=precision)
    torch.compiler.reset()
    found = lightning_trainer.fabric_loop(0.5, precision=precision)
    assert_same(found, expected, rel=2e-3 if precision == "bf16-mixed" else 1e-5)
    (full, _) = planned()
    # Fabric converts inputs and targets inside of the step: two of bfloat16[512, 64], which the caller holds.
    converted_bytes = 2 * 2 * 512 * 64 if precision == "bf16-mixed" else 0
    assert full.measured_peak_bytes is not None
    assert_within_budget(full.measured_peak_bytes - converted_bytes, full.budget_bytes)


def test_fabrics_log_has_the_figures_of_a_model_that_is_compiled_in_place(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=FabricLogger(tmp_path, flush_logs_every_n_steps=1))
    net = lightning_trainer.Net()
    net.compile(backend="remat", options={"memory_budget": 0.5, "compiler": "eager"})
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    report = MemoryReport()
    for step in range(4):
        report.begin()
        fabric.backward(net(torch.randn(64, 64), torch.randn(64, 64)))
        report.end()
        fabric.log_dict({"step_of_loop": step, **report.figures()}, step=step)
        optimizer.step()
        optimizer.zero_grad()
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    figures = report.figures()
    assert len(figures) == 4 and [bool(row["remat_measured_mib"]) for row in rows] == [False, False, True, True]
    assert {name: float(rows[3][name]) for name in figures} == pytest.approx(figures)
