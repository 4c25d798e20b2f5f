"""The command that says what `inputs="as_plain"` costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import inputs
from benchmarks.inputs import InputsRow, floor_costs, misses, table, time_costs


def rows(model: str, floor: int = 100, extra: float = 0.1, *, is_kept: bool = True) -> list[InputsRow]:
    """Rows of a model whose floor is 100 and whose extra time is 0.1 under `constant`."""
    row = InputsRow(model, "constant", "min", 100, True, 0.5, 0, 0, 0.0, 2.0)
    constant = [row, *(replace(row, budget=share, extra=0.1) for share in ("0.6", "0.4"))]
    changes = {"inputs": "as_plain", "copies": 3, "copied_bytes": 1 << 20, "copy_time": 0.001, "planning_s": 3.0}
    plain = [replace(row, **changes) for row in constant]
    plain[0] = replace(plain[0], peak_bytes=floor)
    return [*constant, plain[0], *(replace(row, extra=extra, is_kept=is_kept) for row in plain[1:])]


def test_costs_are_differences_between_the_two_values() -> None:
    found = rows("gpt", floor=102, extra=0.104)
    assert floor_costs(found) == {"gpt": pytest.approx(0.02)}
    assert time_costs(found) == {("gpt", "0.6"): pytest.approx(0.004), ("gpt", "0.4"): pytest.approx(0.004)}


def test_what_only_one_value_keeps_is_not_compared() -> None:
    assert time_costs(rows("gpt", is_kept=False)) == {}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rows("gpt"), []),
        (rows("gpt", floor=104), ["gpt: the floor", "the median"]),
        ([*rows("lora", floor=106), *rows("gpt"), *rows("vit")], []),
        ([*rows("lora", floor=108), *rows("gpt"), *rows("vit")], ["lora: the floor"]),
        (rows("gpt", extra=0.12), ["gpt at 0.4", "gpt at 0.6"]),
    ],
)
def test_misses(found: list[InputsRow], expected: list[str]) -> None:
    said = misses(found)
    assert len(said) == len(expected)
    assert all(line.startswith(start) for line, start in zip(said, expected, strict=True))


def test_table() -> None:
    (line,) = table(rows("gpt", floor=102, extra=0.104))
    assert line == [
        "gpt", "0.0", "+2.00%", "3: 1.00 MiB, 0.10%", "10.4%", "+0.40%", "3: 1.00 MiB, 0.10%",
        "10.4%", "+0.40%", "3: 1.00 MiB, 0.10%", "1.50",
    ]  # fmt: skip


@pytest.mark.full
def test_toy_run(tmp_path: Path) -> None:
    out = tmp_path / "inputs.json"
    inputs.main(["--toy", "--model", "frozen stem", "--json", str(out)])
    stored = json.loads(out.read_text())["rows"]
    assert [(row["inputs"], row["budget"]) for row in stored] == [
        (value, budget) for value in ("constant", "as_plain") for budget in ("min", "0.6", "0.4")
    ]
    assert sum(row["copies"] for row in stored if row["inputs"] == "as_plain") > 0
