"""Weights & Biases without a network: the figures of a step, read back from the file of an offline run."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "wandb", reason="wandb is not installed: pip install wandb, into the environment of make test-stacks"
)

import wandb
from wandb.proto.wandb_internal_pb2 import Record

pytestmark = pytest.mark.full

BLOCK, HEAD = 32768, struct.Struct("<IHB")
"""A run's file is a log in the format of LevelDB, behind 7 bytes of wandb's own: heads of checksum, length and part."""
WHOLE, LAST = 1, 4


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()


def records(data: bytes) -> Iterator[Record]:
    """The records of a run's file, which may go on in the next block of 32 KiB."""
    at, parts = HEAD.size, b""
    while at + HEAD.size <= len(data):
        if BLOCK - at % BLOCK < HEAD.size:  # too short for a head
            at += BLOCK - at % BLOCK
            continue
        _, length, part = HEAD.unpack_from(data, at)
        parts += data[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length
        if part in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """The log of the only run in the folder, a row for each call of `wandb.log`."""
    (file,) = folder.rglob("*.wandb")
    rows = [record.history.item for record in records(file.read_bytes()) if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: make test-stacks")
    import hf_trainer

    from compile_remat.integrations.transformers import MemoryCallback

    model = hf_trainer.llama()
    run = hf_trainer.trainer(
        model, "min", report_to=["wandb"], max_steps=5, gradient_accumulation_steps=1, run_name="toy"
    )
    model.compile(backend="remat", options={"memory_budget": 0.5, "compiler": "eager"})
    run.add_callback(callback := MemoryCallback(run))
    run.train()
    wandb.finish()
    figures = {f"train/{name}": value for name, value in callback.report.figures().items()}
    assert len(figures) == 4
    rows = [row for row in history(tmp_path) if "train/loss" in row]
    logged = {row["train/global_step"]: {name: row[name] for name in figures if name in row} for row in rows}
    assert logged[1] == logged[2] == {} and logged[5] == figures  # the third call is the first measured one
    assert set(logged[3]) == set(logged[4]) == set(figures)  # of a batch that may be smaller than a later one


def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed: make test-stacks")
    import lightning_trainer
    from lightning.pytorch.loggers import WandbLogger

    from compile_remat.integrations.lightning import MemoryCallback

    callback = MemoryCallback()
    more: dict[str, Any] = {"log_every_n_steps": 1, "accumulate_grad_batches": 1, "max_epochs": 1}
    lightning_trainer.fit(0.5, [callback], logger=WandbLogger(save_dir=tmp_path, offline=True), **more)
    wandb.finish()
    figures = callback.report.figures()
    assert len(figures) == 4
    rows = [row for row in history(tmp_path) if "loss" in row]
    logged = {row["trainer/global_step"]: {name: row[name] for name in figures if name in row} for row in rows}
    assert logged == {0: {}, 1: {}, 2: pytest.approx(figures), 3: pytest.approx(figures)}
