"""The fragment for notebooks."""

from dataclasses import replace

from compile_remat.pages.notebook import notebook_html
from tests.pages.examples import HOSTILE, hostile, small
from tests.pages.test_page import read


def test_a_picture_and_a_short_table() -> None:
    texts = read(notebook_html(small())).texts
    assert [
        t for t in ("peak 9.0 MiB", "budget 10.0 MiB", "12.0 MiB", "feasible", "forward", "saved") if t not in texts
    ] == []


def test_nothing_runs_and_nothing_is_fetched() -> None:
    fragment = notebook_html(hostile())
    assert read(fragment).scripts == 0 and "<style" not in fragment and HOSTILE not in fragment


def test_without_a_step_the_totals_are_left() -> None:
    fragment = notebook_html(replace(small(), step=None))
    assert "<svg" not in fragment and "9.0 MiB" in fragment
