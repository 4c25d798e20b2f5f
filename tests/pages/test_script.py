"""The pure functions of the page's script, under node: shapes and labels stand where the bytes say."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_remat._util.units import GIB, KIB, MIB, format_bytes
from compile_remat.pages import page
from compile_remat.pages.figures import COLOURS, FrontierPoint, Kind, PageFigures
from compile_remat.pages.page import PAGE_BINS, page_data
from tests.pages.examples import small, small_step

NODE = shutil.which("node")
HEIGHT = 1000

pytestmark = pytest.mark.skipif(NODE is None, reason="no node")


def called(function: str, *arguments: object) -> Any:
    """Returns the result of a function of the script."""
    script = Path(page.__file__).with_name("page.js").read_text(encoding="utf-8")
    program = f"{script}\nconsole.log(JSON.stringify({function}(...{json.dumps(arguments)})))"
    done = subprocess.run([str(NODE), "-"], input=program, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def drawn(figures: PageFigures) -> Any:
    return called("stepChart", page_data(figures, PAGE_BINS)["step"], COLOURS)


def labels_of(figures: PageFigures) -> dict[str, Any]:
    return {label["role"]: label for label in drawn(figures)["labels"] if label["role"] != "area"}


def test_bytes_are_written_as_in_python() -> None:
    amounts = [
        0,
        1023,
        KIB,
        KIB + 51,
        1023 * KIB + 971,
        MIB - 1,
        MIB,
        5 * MIB // 4,
        3 * MIB // 20,
        77 * GIB,
        5 << 40,
        9 << 50,
    ]
    assert called("((...amounts) => amounts.map(bytes))", *amounts) == [format_bytes(n) for n in amounts]


def test_the_outline_of_an_area() -> None:
    """Saved stands on the output of 1 MiB that begins in the third column; the area goes down to 0, and the output covers it."""
    shapes = drawn(small())["shapes"]
    (path,) = re.findall(r'<path class="saved"[^>]* d="([^"]*)"', shapes)
    top = page_data(small(), PAGE_BINS)["step"]["axis"]["top_bytes"]
    y = {n: round(HEIGHT * (1 - n * MIB / top)) for n in range(8)}
    assert path == f"M0 {y[4]}H2V{y[5]}H4V{y[7]}H5V{y[3]}H6V{HEIGHT}H0Z"
    assert re.findall(r'<path class="(\w+)" fill="#', shapes) == [kind.value for kind in reversed(Kind)]


def test_labels_name_peaks_and_lines() -> None:
    labels = labels_of(small())
    assert {role: label["text"] for role, label in labels.items()} == {
        "plan": "peak 9.0 MiB",
        "other": "plain torch.compile 12.0 MiB",
        "budget": "budget 10.0 MiB",
        "floor": "floor 8.0 MiB",
    }
    assert labels["plan"]["x"] == pytest.approx(3.5 / 6)
    assert {labels[name]["side"] for name in ("budget", "floor")} == {"start"}, "far from the label of the peak"


def test_an_area_is_named_in_its_middle() -> None:
    """The output is too low for its name."""
    areas = {label["text"]: label["x"] for label in drawn(small())["labels"] if label["role"] == "area"}
    middles = {"gradient": 5 / 6, "saved": 2.5 / 6, "recomputed": 3.5 / 6, "temporary": 1.5 / 6}
    assert areas == pytest.approx(middles)


def test_a_budget_at_the_peak_is_named_below_its_line_and_not_over_the_floors_name() -> None:
    for floor_bytes, is_below in ((None, True), (4 * MIB, True), (9 * MIB, False)):
        figures = replace(small(), budget_bytes=9 * MIB + 4096, floor_bytes=floor_bytes)
        assert labels_of(figures)["budget"]["isBelow"] == is_below


def test_a_budget_far_above_all_curves_is_left_out() -> None:
    """Else nobody could see the curves."""
    figures = replace(small(), budget_bytes=100 * MIB)
    assert "budget" not in labels_of(figures)
    assert page_data(figures, PAGE_BINS)["step"]["axis"]["top_bytes"] < 20 * MIB


def test_a_kind_that_is_never_live_is_not_drawn() -> None:
    step = small_step()
    step = replace(step, areas={**step.areas, Kind.GRADIENT: (0,) * 6})
    assert 'class="gradient"' not in drawn(replace(small(), step=step))["shapes"]


def test_the_frontier() -> None:
    chart = called("frontierChart", page_data(small(), PAGE_BINS)["frontier"], COLOURS)
    (label,) = chart["labels"]
    assert label["text"] == "this plan: 9.0 MiB, +5.00 %" and label["side"] == "end"
    assert re.findall("<title>(.*?)</title>", chart["shapes"]) == [
        "12.0 MiB, +0.00 %",
        "9.0 MiB, +5.00 %",
        "8.0 MiB, +9.00 %",
    ]
    names = [tick["text"] for tick in chart["ticks"]]
    assert names == ["0 %", "2 %", "4 %", "6 %", "8 %", "10 %", "0", "5 MiB", "10 MiB"]
    (path,) = re.findall(r'class="plans"[^>]* d="([^"]*)"', chart["shapes"])
    heights = [int(y) for y in re.findall(r" (\d+)", path)]
    assert heights == sorted(heights) and heights[-1] == HEIGHT, "from the lowest plan to the fastest, at 0 %"


def test_a_plan_that_is_faster_than_the_base_stands_below_0() -> None:
    figures = replace(small(), frontier=(FrontierPoint(8 * MIB, 9_900_000), FrontierPoint(9 * MIB, 9_800_000)))
    chart = called("frontierChart", page_data(figures, PAGE_BINS)["frontier"], COLOURS)
    assert [tick["text"] for tick in chart["ticks"]][:3] == ["-2.0 %", "-1.5 %", "-1.0 %"]


def test_the_largest_tensors_of_a_moment() -> None:
    step = page_data(small(), PAGE_BINS)["step"]
    found = called("alive", step, step["peak"], 2)
    assert [size for size, *_ in found["kept"]] == [4 * MIB, 3 * MIB]
    assert (found["others"], found["left"]) == (1, 2 * MIB), "the output of 1 MiB, and 1 MiB of workspace"
