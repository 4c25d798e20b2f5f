"""The verdicts of `benchmarks.stacks`, and the rows that it stores."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import stacks
from benchmarks.stacks import StackRow, largest_difference

MIB = 2**20
GOOD = StackRow("Trainer", 50, 1e-7, 0.0, 2 * MIB, 2 * MIB, 2 * MIB, 4 * MIB, 0.1)


def test_losses_are_equal_within_those_of_two_plain_runs() -> None:
    assert GOOD.verdict == "ok"
    assert replace(GOOD, difference=1e-5).verdict == "miss: losses differ by more than by threads"
    assert replace(GOOD, difference=1e-5, by_threads=1e-5).verdict == "ok"
    assert replace(GOOD, measured_bytes=2 * MIB + 1).verdict == "miss: above the budget"
    assert replace(GOOD, measured_bytes=None).verdict == "miss: nothing was measured"
    assert largest_difference([1.0, 2.0], [1.0, 4.0]) == 0.5
    with pytest.raises(ValueError):
        largest_difference([1.0], [1.0, 2.0])


def test_rows_that_are_stored_are_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(stacks.harness, "rows_of_process", lambda command: [asdict(replace(GOOD, tool=command[-1]))])
    assert stacks.main(["--tool", "Trainer", "--json", str(path)]) == 0
    assert stacks.main(["--tool", "PEFT", "--json", str(path)]) == 0
    monkeypatch.setattr(stacks.harness, "rows_of_process", None)
    assert stacks.main(["--tool", "PEFT", "--json", str(path), "--show"]) == 0
    assert [row["tool"] for row in json.loads(path.read_text())["rows"]] == ["Trainer", "PEFT"]
    assert "1.0e-07" in capsys.readouterr().out


def test_a_tool_that_is_not_installed_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setattr(stacks, "declare_missing_operators", lambda: None)
    row = stacks.row_of("SFTTrainer")
    assert row.skipped.startswith("not measured: ") and row.verdict == row.skipped
