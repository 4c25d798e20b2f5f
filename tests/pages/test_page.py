"""The page and the notebook's fragment as text: complete, small, closed to the network, and safe whatever a module is called."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compile_remat.pages.figures import COLOURS, Kind, StepFigures
from compile_remat.pages.page import (
    MOST_KEPT,
    MOST_TICKS,
    PAGE_BINS,
    binned,
    byte_axis,
    html_page,
    largest,
    notebook_html,
    page_data,
    write_page,
)
from tests.pages.examples import HOSTILE, MIB, hostile, large, small, small_step

VOID = {"meta", "link", "input"}


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
    wanted = ["9.0 MiB", "12.0 MiB", "10.0 MiB", "8.0 MiB", "something to note", "backward, at b", "body.0-1", "+5.00%"]
    assert [text for text in wanted if text not in texts] == []


def test_the_script_gets_the_figures() -> None:
    page, data = html_page(small()), page_data(small(), PAGE_BINS)
    assert data_of(page) == json.loads(json.dumps(data))
    a = ["a", "float32[1024, 1024]", "saved for the backward", "body.0", "u/m.py:3"]
    size, kind, begin, end, *texts = data["step"]["tensors"][0]
    assert (size, kind, begin, end, [data["step"]["strings"][k] for k in texts]) == (4 * MIB, "saved", 0, 4, a)
    assert data["step"]["names"][data["step"]["peak"]] == "b"


def test_the_page_is_closed_to_the_network() -> None:
    page = html_page(small())
    assert "default-src 'none'" in page
    assert re.findall(r"https?:|//\w+\.\w|@import|url\(", page) == []


def test_texts_are_escaped() -> None:
    page = html_page(hostile())
    reader = read(page)
    assert reader.scripts == read(html_page(small())).scripts
    assert reader.texts.count(HOSTILE) > 5
    assert HOSTILE in data_of(page)["step"]["strings"]


def test_a_page_of_a_large_graph_is_small() -> None:
    assert len(html_page(large(2000)).encode()) < 1_000_000


def test_many_modules_have_a_row_together() -> None:
    texts = read(html_page(large(10))).texts
    assert "150 more" in texts and texts.count("all") == 1
    assert "model.layers.149.mlp.up_proj" in texts and "model.layers.150.mlp.up_proj" not in texts


def test_a_page_without_a_step_has_no_script() -> None:
    bare = replace(small(), step=None, modules=(), frontier=())
    page = html_page(bare)
    assert read(page).scripts == 0 and "predicted peak" in page


def test_without_a_script_the_page_shows_the_notebooks_picture() -> None:
    texts = read(html_page(small())).texts
    assert "peak 9.0 MiB" in texts and "budget 10.0 MiB" in texts


def test_a_page_is_written_with_its_folders(tmp_path: Path) -> None:
    write_page(small(), tmp_path / "a" / "b.html")
    assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8") == html_page(small())


# -- the fragment for notebooks -------------------------------------------------------------------------------------------


def test_a_picture_and_a_short_table() -> None:
    texts = read(notebook_html(small())).texts
    wanted = (
        "peak 9.0 MiB",
        "budget 10.0 MiB",
        "floor 8.0 MiB",
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


def test_an_area_of_the_picture_ends_where_its_bytes_do() -> None:
    """Saved stands on the output of 1 MiB that begins in the third column; the output is drawn over it."""
    step = page_data(small(), PAGE_BINS)["step"]
    y = {n: round(1000 * (1 - n * MIB / step["axis"]["top_bytes"])) for n in range(8)}
    (path,) = re.findall(rf'fill="{COLOURS[Kind.SAVED]}" d="([^"]*)"', notebook_html(small()))
    assert path == f"M0 {y[4]}V{y[4]}H1V{y[4]}H2V{y[5]}H3V{y[5]}H4V{y[7]}H5V{y[3]}H6V1000H0Z"


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
