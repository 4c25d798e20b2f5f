"""`compile-remat plan MODEL --devices A,B` in this process."""

from __future__ import annotations

import json

import pytest
import torch

from compile_remat import cli
from compile_remat.forecast import device_choice

MODEL = "tests.planned_models:convolution"


def test_one_line_for_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", MODEL, "--devices", "h100-sxm,t4"]) == 0
    text = capsys.readouterr()
    lines = [line.split() for line in text.out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("h100-sxm", "t4")] == ["h100-sxm", "t4"]
    assert "without the optimizer's step" in text.out and "planning for t4" in text.err


def test_a_row_is_printed_when_it_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = list[str]()
    planned = device_choice._row

    def row(*given: object, **options: object) -> device_choice.DeviceRow:
        seen.append(capsys.readouterr().out)
        return planned(*given, **options)  # type: ignore[arg-type]

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


def test_each_device_has_the_plan_within_the_budget_and_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", MODEL, "--devices", "h100-sxm,t4", "--no-largest-batch"]
    assert cli.main([*given, "--budget", "min"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith("optimizer adamw, budget min") and "at batch 4" not in err
    assert "second line" not in out and [line.split()[0] for line in out.splitlines()[3:5]] == ["h100-sxm", "t4"]
    peaks = {}
    for budget in ("min", "max", "0.8"):
        assert cli.main([*given, "--budget", budget, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["largest_batch"] for row in rows] == [None, None]
        peaks[budget] = [row["peak_bytes"] for row in rows]
    for low, middle, high in zip(peaks["min"], peaks["0.8"], peaks["max"], strict=True):
        assert low <= middle <= 0.8 * high
    assert cli.main([*given, "--budget", "1MiB", "--batch", "4096"]) == 2
    assert "no plan fits memory_budget = 1MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "precision", "noted"),
    [("fp32", "highest", ["a100-40gb"]), ("fp32", "high", []), ("bf16", "highest", [])],
)
def test_products_without_tf32_are_said_where_they_matter(
    dtype: str, precision: str, noted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_float32_matmul_precision()
    given = ["plan", "tests.planned_models:wide_products", "--devices", "a100-40gb,t4", "--dtype", dtype]
    try:
        torch.set_float32_matmul_precision(precision)
        assert cli.main([*given, "--no-largest-batch"]) == 0
        text = capsys.readouterr().out
        assert cli.main([*given, "--no-largest-batch", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
    finally:
        torch.set_float32_matmul_precision(before)
    assert ("step of a100-40gb: float32 products are priced without TF32" in text) == bool(noted)
    assert [row["device"] for row in rows if row["time_note"]] == noted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--devices", "t4,t4"], "name each device once"),
        (["--devices", "t4", "--compare"], "--compare is for one --device: its table has a row for each baseline"),
        (["--devices", "t4", "--html", "page.html"], "--html is for one --device: a page shows one plan"),
        (["--devices", "t4", "--budget", "1MiBB"], "'1MiBB'"),
        (["--devices", "t4,h101"], "no such device"),
    ],
)
def test_what_makes_no_sense_is_said(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", MODEL, *given]) == 2
    assert text in capsys.readouterr().err
