"""Tables as text, and as rich draws them."""

import pytest

from compile_remat._util import text_table
from compile_remat._util.text_table import format_table, print_table


def test_tables_line_up() -> None:
    text = format_table("title", ("a", "b"), [("one", "1"), ("three", "23")])
    assert text.splitlines() == ["title", "  a       b", "  -----  --", "  one     1", "  three  23"]
    assert format_table("t", ("", ""), [("x", "1")]).splitlines() == ["t", "  x  1"]


def test_without_a_title_nothing_is_indented_and_columns_may_stand_left(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("", ""), [("x", "long"), ("yy", "s")], align="ll")
    assert capsys.readouterr().out.splitlines() == ["x   long", "yy  s"]


def test_rich_draws_the_table_where_it_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    text_table._print_rich("title", ("a", "b"), [("one", "1")], "lr")
    text = capsys.readouterr().out
    assert "title" in text and "one" in text and "\u2500" in text


def test_on_a_narrow_terminal_no_figure_is_cut_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "24")
    heads = ("device", "memory", "bandwidth")
    text_table._print_rich("", heads, [("infiniband-ndr", "123456789", "987654321")], "lrr")
    text = capsys.readouterr().out
    assert "\u2026" not in text
    for digit in "123456789":
        assert text.count(digit) == 2


def test_a_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    long = "a name of many words " * 5
    print_table("a title " * 20, ("what", "size"), [(long, "1.0 GiB"), ("short", "2.0 GiB")])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("many words") == 5 and lines[-1].split() == ["short", "2.0", "GiB"]
