"""`compile-remat plan MODEL --devices A,B` in this process."""

from __future__ import annotations

import json

import pytest

from compile_remat import cli
from compile_remat.forecast import device_choice

MODEL = "tests.planned_models:convolution"


def test_one_line_for_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", MODEL, "--devices", "h100-sxm,t4"]) == 0
    text = capsys.readouterr()
    lines = [line.split() for line in text.out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("h100-sxm", "t4")] == ["h100-sxm", "t4"]
    assert "the optimizer's step is not in them" in text.out and "planning for t4" in text.err


def test_a_row_is_printed_when_it_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = list[str]()
    planned = device_choice._row

    def row(*given: object) -> device_choice.DeviceRow:
        seen.append(capsys.readouterr().out)
        return planned(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(device_choice, "_row", row)
    assert cli.main(["plan", MODEL, "--devices", "h100-sxm,t4"]) == 0
    head, first = seen
    assert head.splitlines()[1].split() == "device batch needs room fits step extra samples/s".split()
    asked, largest = first.splitlines()
    assert asked.split()[0] == "h100-sxm" and int(largest.split()[0]) > int(asked.split()[1])
    text = head + first + capsys.readouterr().out
    assert max(map(len, (line for line in text.splitlines() if line.startswith("  ")))) <= 80


def test_json_has_the_figures_and_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", MODEL, "--devices", "t4,h100-sxm", "--optimizer", "40GiB", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)
    assert (small["device"], small["fits"], small["largest_batch"]) == ("t4", False, 0)
    assert "alone need" in small["why"] and small["samples_per_s"] is None
    assert large["fits"] and large["largest_batch"] > 1 and large["samples_per_s"] > 0 and large["tokens_per_s"] is None


def test_the_status_says_that_no_device_is_large_enough() -> None:
    assert cli.main(["plan", MODEL, "--devices", "t4", "--optimizer", "40GiB"]) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--devices", "t4,t4"], "name each device once"),
        (["--devices", "t4", "--budget", "0.5"], "--budget is for one --device"),
        (["--devices", "t4", "--compare"], "--compare is for one --device"),
        (["--devices", "t4,h101"], "no such device"),
    ],
)
def test_what_makes_no_sense_is_said(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", MODEL, *given]) == 2
    assert text in capsys.readouterr().err
