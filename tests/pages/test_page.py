"""The page as text: complete, small, closed to the network, and safe whatever a module is called."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from compile_remat.pages.page import html_page, write_page
from compile_remat.pages.step_section import MOST_KEPT, largest
from tests.pages.examples import HOSTILE, hostile, large, small, small_step

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


def data_of(page: str) -> dict[str, object]:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    found: dict[str, object] = json.loads(text)
    return found


def test_the_page_holds_the_figures() -> None:
    texts = read(html_page(small())).texts
    wanted = ["9.0 MiB", "12.0 MiB", "10.0 MiB", "8.0 MiB", "something to note", "backward, at b", "body.0-1", "+5.00%"]
    assert [text for text in wanted if text not in texts] == []


def test_the_page_is_closed_to_the_network() -> None:
    page = html_page(small())
    assert "default-src 'none'" in page
    assert re.findall(r"https?:|//\w+\.\w|@import|url\(", page) == []


def test_texts_are_escaped() -> None:
    page = html_page(hostile())
    reader = read(page)
    assert reader.scripts == read(html_page(small())).scripts
    assert reader.texts.count(HOSTILE) > 5
    assert HOSTILE in data_of(page)["strings"]  # type: ignore[operator]


def test_a_page_of_a_large_graph_is_small() -> None:
    assert len(html_page(large(2000)).encode()) < 1_000_000


def test_the_smallest_of_very_many_tensors_are_left_out() -> None:
    step = large(2200).step
    assert step is not None
    kept = largest(step.tensors, MOST_KEPT)
    assert len(kept) == MOST_KEPT and list(kept) == [t for t in step.tensors if t in set(kept)]


def test_a_page_without_a_step_has_no_script() -> None:
    bare = replace(small(), step=None, modules=(), frontier=())
    page = html_page(bare)
    assert read(page).scripts == 0 and "predicted peak" in page


def test_a_page_is_written_with_its_folders(tmp_path: Path) -> None:
    write_page(small(), tmp_path / "a" / "b.html")
    assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8") == html_page(small())


def test_the_moment_that_is_shown_first_is_the_peak() -> None:
    texts = read(html_page(replace(small(), step=small_step()))).texts
    assert "1 more tensors and workspaces" not in "".join(texts)
    assert "0 more tensors and workspaces: 1.0 MiB" in texts  # 9 MiB less a, b and out
