"""The figures that `benchmarks.first_step` counts, and the models that it builds."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from benchmarks import first_step
from benchmarks.common import first_step_run
from benchmarks.common.first_step_run import Taken
from benchmarks.first_step import FirstStepRow
from benchmarks.models import first_steps


def test_ratios_are_to_plain_of_the_same_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = {"plain": (40.0, 8.0), "0.5": (50.0, 8.4), "min": (60.0, 9.6)}

    def run(model: str, setting: str, *, is_toy: bool) -> tuple[Taken, Taken]:
        cold_s, warm_s = times[setting]
        return Taken(cold_s, 2 * cold_s, 7), Taken(warm_s, warm_s)

    monkeypatch.setattr(first_step, "run", run)
    path = tmp_path / "rows.json"
    for _ in range(2):
        assert first_step.main(["--model", "gpt", "--json", str(path)]) == 0
        monkeypatch.setattr(first_step, "run", None)  # rows that are stored are not made again
    stored = json.loads(path.read_text())["rows"]
    rows = [FirstStepRow.of(fields) for fields in stored]
    assert [asdict(row) for row in rows] == stored
    assert [row.setting for row in rows] == ["plain", "0.5", "min"]
    assert [first_step.ratios(row, rows) for row in rows] == [(None, None), (1.25, 1.05), (1.5, 1.2)]
    assert "0.5, empty caches: median 1.25, worst 1.25" in first_step.summary(rows)


def test_models_of_a_package_that_is_missing_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step_run, "find_spec", lambda name: None)
    row = first_step.row_of("transformers t5", "plain", is_toy=True)
    assert row.skipped == "transformers is not installed"
    assert row == FirstStepRow.of(asdict(row)) and first_step.table([row])[1][0][-1] == row.skipped


def test_a_graph_break_changes_no_number() -> None:
    losses = []
    for name in ("gpt", first_step_run.BROKEN):
        torch.manual_seed(0)
        module, step = first_steps.built(name, 0.1)
        losses.append(step(module).item())
    assert losses[0] == losses[1]
