"""Progress without a terminal: lines, but few of them."""

import pytest

from compile_remat._util.progress import progress_bar


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
