"""The page and the notebook's fragment as text: complete, small, closed to the network, and safe whatever a module is called."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compile_remat._util.units import parse_bytes
from compile_remat.pages.figures import BaseStep, Kind, ModuleRow, PageFigures, StepFigures
from compile_remat.pages.page import (
    HEADROOM,
    MOST_KEPT,
    MOST_TICKS,
    PAGE_BINS,
    binned,
    budget_option,
    byte_axis,
    html_page,
    largest,
    module_groups,
    notebook_html,
    page_data,
    percent_axis,
    write_page,
)
from tests.pages.examples import HOSTILE, MIB, hostile, large, small, small_step

VOID = {"meta", "link", "input"}
END = "</body></html>"
"""The rest of a page that is cut off before its script."""


class Reader(HTMLParser):
    """Collects texts and open elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return json.loads(text)


# -- the page -----------------------------------------------------------------------------------------------------------


def test_the_page_holds_the_figures() -> None:
    texts = read(html_page(small())).texts
    wanted = [
        "9.0 MiB",
        "12.0 MiB",
        "10.0 MiB",
        "8.0 MiB",
        "something to note",
        "backward, at b",
        "body.0-1",
        "+5.00 %",
    ]
    assert [text for text in wanted if text not in texts] == []


def test_the_script_gets_the_figures() -> None:
    page, data = html_page(small()), page_data(small(), PAGE_BINS)
    assert data_of(page) == json.loads(json.dumps(data["script"]))
    a = ["a", "float32[1024, 1024]", "saved for the backward", "body.0", "u/m.py:3"]
    size, kind, begin, end, *texts = data["script"]["tensors"][0]
    assert (size, kind, begin, end, [data["script"]["strings"][k] for k in texts]) == (4 * MIB, "saved", 0, 4, a)
    assert data["script"]["names"][data["script"]["peak"]] == "b"


def test_the_page_is_closed_to_the_network() -> None:
    page = html_page(small())
    assert "default-src 'none'" in page
    assert re.findall(r"https?:|//\w+\.\w|@import|url\((?!#)", page) == []


def test_texts_are_escaped() -> None:
    page = html_page(hostile())
    reader = read(page)
    assert reader.scripts == read(html_page(small())).scripts
    assert reader.texts.count(HOSTILE) > 5
    assert HOSTILE in data_of(page)["strings"]


def test_a_page_of_a_large_graph_is_small() -> None:
    assert len(html_page(large(2000)).encode()) < 1_000_000


def test_modules_stand_in_groups_in_the_models_order() -> None:
    paths = [
        "model.embed",
        "model.layers.0-3.mlp",
        "model.layers.4.mlp",
        "head",
        "0-10.qkv",
        "11.qkv",
        "0-11",
        "",
        "conv1",
    ]
    groups = module_groups([ModuleRow(path, 1, 1, 1, 0, 0, 0) for path in paths])
    assert [(name, [row.path for row in rows]) for name, rows in groups] == [
        ("model.embed", paths[:1]),
        ("model.layers", paths[1:3]),
        ("head", ["head"]),
        ("*.qkv", ["0-10.qkv", "11.qkv"]),
        ("*", ["0-11"]),
        ("", [""]),
        ("conv1", ["conv1"]),
    ]


def test_a_group_has_its_sums_and_its_rows() -> None:
    rows = [ModuleRow(f"layers.{k}", 2, 1, k * MIB, 1, 3 * MIB, 500_000) for k in (1, 2)]
    texts = read(html_page(replace(small(), modules=tuple(rows)))).texts
    group = texts[texts.index("layers") :]
    assert group[1] == " 4 modules" and "6.0 MiB" in group[: group.index("layers.1")]
    assert [text for text in group if text in ("layers.1", "layers.2", "all")] == ["layers.1", "layers.2", "all"]


def test_a_page_without_a_step_has_no_script() -> None:
    bare = replace(small(), step=None, modules=(), frontier=())
    page = html_page(bare)
    assert read(page).scripts == 0 and "predicted peak" in page


def test_the_charts_need_no_script() -> None:
    page = html_page(small()).partition("<script")[0]
    texts = read(page + END).texts
    wanted = ("peak 9.0 MiB", "budget 10.0 MiB", "lowest reachable peak 8.0 MiB", '"memory_budget": "9MiB"', "5 %")
    assert [text for text in wanted if text not in texts] == []
    assert len(area_paths(page)) == len(Kind)


@pytest.mark.parametrize("draw", [html_page, notebook_html])
def test_a_limit_has_one_name(draw: Callable[[PageFigures], str]) -> None:
    texts = " ".join(read(draw(small()).partition("<script")[0] + END * (draw is html_page)).texts)
    assert "lowest reachable peak 8.0 MiB" in texts and "floor" not in texts


def test_a_budget_far_above_all_crushes_neither_bars_nor_curves() -> None:
    page = html_page(replace(small(), budget_bytes=21 << 30))
    widths = dict(re.findall(r'class="bar ([\w ]*)" style="width:([\d.]+)%', page))
    assert widths["limit beyond"] == "62.0" and float(widths["plan"]) > 40
    texts = read(page).texts
    assert "budget 21.0 GiB (above the chart)" in texts and "50 MiB" not in texts


def test_each_plan_of_the_frontier_has_a_budget_to_copy_and_plain_torch_compile_is_among_them() -> None:
    page = html_page(small())
    copied = [unescape(text) for text in re.findall(r'data-copy="([^"]*)"', page)]
    assert copied.count('"memory_budget": "9MiB"') == 2, "the point, and the line of the table"
    assert len(copied) == 2 * len(small().frontier)
    rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
    assert any("plain torch.compile" in row and "12.0 MiB" in row and "+0.00 %" in row for row in rows)


def test_plans_that_move_nothing_are_a_second_curve_without_budgets_to_copy() -> None:
    figures = small()
    without = tuple(
        replace(p, time_ns=p.time_ns + 10**6, is_chosen=False, moves_nothing=True) for p in figures.frontier
    )
    page, before = html_page(replace(figures, frontier=(*figures.frontier, *without))), html_page(figures)
    assert 'id="without"' in page and 'id="without"' not in before
    assert page.count("data-copy=") == before.count("data-copy=")


def test_a_page_is_written_with_its_folders(tmp_path: Path) -> None:
    write_page(small(), tmp_path / "a" / "b.html")
    assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8") == html_page(small())


# -- the fragment for notebooks -------------------------------------------------------------------------------------------


def test_a_picture_and_a_short_table() -> None:
    texts = read(notebook_html(small())).texts
    wanted = (
        "peak 9.0 MiB",
        "budget 10.0 MiB",
        "lowest reachable peak 8.0 MiB",
        "plain torch.compile 12.0 MiB",
        "12.0 MiB",
        "feasible",
    )
    assert [t for t in (*wanted, "forward", "saved", "5 MiB") if t not in texts] == []


def test_nothing_runs_and_nothing_is_fetched() -> None:
    fragment = notebook_html(hostile())
    assert read(fragment).scripts == 0 and "<style" not in fragment and HOSTILE not in fragment


def test_without_a_step_the_totals_are_left() -> None:
    fragment = notebook_html(replace(small(), step=None))
    assert "<svg" not in fragment and "9.0 MiB" in fragment


def area_paths(html: str) -> dict[str, str]:
    """The outline of each kind's area."""
    return dict(re.findall(r'<path class="(\w+)" fill="url\(#area\w*-\w+\) #\w+" d="([^"]*)"', html))


@pytest.mark.parametrize("draw", [html_page, notebook_html])
def test_an_area_of_the_picture_ends_where_its_bytes_do(draw: Callable[[PageFigures], str]) -> None:
    """Saved stands on the output of 1 MiB that begins in the third column; the area goes down to 0, and the output covers it."""
    step = page_data(small(), PAGE_BINS)["step"]
    y = {n: round(1000 * (1 - n * MIB / step["axis"]["top_bytes"])) for n in range(8)}
    paths = area_paths(draw(small()))
    assert paths["saved"] == f"M0 {y[4]}H2V{y[5]}H4V{y[7]}H5V{y[3]}H6V1000H0Z"
    assert list(paths) == [kind.value for kind in reversed(Kind)]


def test_a_kind_that_is_never_live_is_not_drawn() -> None:
    step = small_step()
    step = replace(step, areas={**step.areas, Kind.GRADIENT: (0,) * 6})
    assert "gradient" not in area_paths(notebook_html(replace(small(), step=step)))


def test_pictures_in_one_notebook_do_not_share_their_hatching() -> None:
    """It is stretched to each picture's columns."""
    one, other = (set(re.findall(r'id="([^"]*)"', notebook_html(figures))) for figures in (small(), large(100)))
    assert one and not one & other


# -- their data -----------------------------------------------------------------------------------------------------------


def test_few_columns_stay_as_they_are() -> None:
    assert binned(small_step(), PAGE_BINS) == small_step()


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_columns_that_are_put_together_keep_the_peaks_and_the_end_of_the_forward(most: int) -> None:
    step = small_step()
    bins = binned(step, most)
    assert bins.other is not None and max(bins.live_bytes) == 9 * MIB and max(bins.other.live_bytes) == 12 * MIB
    in_forward = step.columns[: step.num_forward - 1]  # its last name says so itself
    assert set(bins.columns[: bins.num_forward]) <= {*in_forward, "end of the forward"}
    assert set(bins.columns[bins.num_forward :]) <= set(step.columns[step.num_forward :])
    assert sum(bins.times_ns) == sum(step.times_ns)


def test_a_large_step_has_bins_that_can_be_seen() -> None:
    step = large().known_step()
    bins = binned(step, PAGE_BINS)
    assert len(bins.columns) <= PAGE_BINS + 1 and max(bins.live_bytes) == max(step.live_bytes)


def test_a_bin_has_the_tensors_of_its_highest_column() -> None:
    step = large(60).known_step()
    bins = binned(step, 17)
    for k, name in enumerate(bins.columns):
        column = step.columns.index(name)
        assert alive(bins, k) == alive(step, column)


def alive(step: StepFigures, column: int) -> list[str]:
    return [t.name for t in step.tensors if t.begin <= column <= t.end]


def test_the_smallest_of_very_many_tensors_are_left_out() -> None:
    step = large(2200).known_step()
    kept = largest(step.tensors, MOST_KEPT)
    assert len(kept) == MOST_KEPT and list(kept) == [t for t in step.tensors if t in set(kept)]


def test_ticks_are_round_amounts_of_one_unit() -> None:
    axis = byte_axis(120 * MIB)
    assert [name for _, name in axis["ticks"]] == ["0", "50 MiB", "100 MiB"] and axis["top_bytes"] > 120 * MIB


@pytest.mark.parametrize("most", [0, 1, 900, 1023, 70_000, 3 << 20, 1000 << 20, 77 << 30, 5 << 40])
def test_every_size_has_an_axis(most: int) -> None:
    axis = byte_axis(most)
    assert axis["top_bytes"] > most and 1 <= len(axis["ticks"]) <= MOST_TICKS
    assert axis["ticks"][-1][0] <= axis["top_bytes"]


@pytest.mark.parametrize(
    ("percents", "ticks"),
    [
        ([0, 5, 9], ["0 %", "5 %", "10 %"]),
        ([0.0], ["0.00 %", "0.01 %"]),
        ([-1, -2], ["-2.0 %", "-1.5 %", "-1.0 %", "-0.5 %", "0.0 %", "0.5 %"]),
        ([-1.2, 26.6], ["0 %", "10 %", "20 %", "30 %"]),
    ],
)
def test_per_cents_have_an_axis(percents: list[float], ticks: list[str]) -> None:
    axis = percent_axis(percents)
    assert [text for _, text in axis["ticks"]] == ticks
    assert axis["bottom"] <= min(0, *percents, 0) and axis["bottom"] + axis["height"] > max(0, *percents, 0)


def test_points_stand_where_their_figures_say() -> None:
    frontier = page_data(small(), PAGE_BINS)["frontier"]
    assert [p["option"] for p in frontier["points"]] == [f'"memory_budget": "{n}MiB"' for n in (8, 9, 12)]
    assert [p["x"] * 12 * HEADROOM for p in frontier["points"]] == pytest.approx([8, 9, 12], rel=1e-3)
    heights = [p["y"] for p in frontier["points"]]
    assert heights == sorted(heights) and heights[-1] == 1, "from the lowest plan to the fastest, at 0 %"
    assert page_data(replace(small(), base=BaseStep(10_000_000)), PAGE_BINS)["frontier"]["plain"] is None


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1, "1KiB"), (9 * MIB + 1, "9217KiB"), (275 * MIB + 1, "276MiB"), (20 << 30, "20GiB")]
)
def test_a_budget_to_copy_is_kept_by_its_plan(nbytes: int, text: str) -> None:
    assert budget_option(nbytes) == f'"memory_budget": "{text}"' and parse_bytes(text) >= nbytes
