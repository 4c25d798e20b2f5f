"""Progress without a terminal: lines, but few of them."""

import io
import re
import sys

import pytest

from compile_remat._util.progress import about, progress_bar


def test_the_first_and_the_last_line_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working", 3, seconds_between=1000) as advance:
        for _ in range(3):
            advance()
    assert capsys.readouterr().err.splitlines() == ["working: 1 of 3", "working: 3 of 3"]


def test_a_text_replaces_the_title_and_need_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working", 2, seconds_between=0) as advance:
        advance("compiling", 0)
        advance()
    with progress_bar("measuring", None, seconds_between=0) as advance:
        advance("round 1")
    assert capsys.readouterr().err.splitlines() == ["compiling: 0 of 2", "working: 1 of 2", "round 1"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_set", [False, True])
def test_a_bar_has_no_colours_under_no_color(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://no-color.org"""
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("NO_COLOR", "1") if is_set else monkeypatch.delenv("NO_COLOR", raising=False)
    with progress_bar("working", 2) as advance:
        advance()
    assert "working" in terminal.getvalue()
    assert bool(re.search(r"\x1b\[[39]\dm", terminal.getvalue())) is not is_set


def test_an_estimate_is_said_from_ten_seconds_on() -> None:
    assert [about(seconds) for seconds in (9.9, 42.3, 200.0)] == ["", " (about 42 s)", " (about 3 min)"]


def test_a_hidden_bar_leaves_stdout_to_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress_bar("working", 2) as display:
        display()
        with display.hidden():
            print("a result")
    assert capsys.readouterr().out == "a result\n" and "a result" not in terminal.getvalue()
