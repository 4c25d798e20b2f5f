"""Numbers on disk: a broken file is measured again, and processes do not lose each other's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_remat._util.number_file import NumberFile


def test_numbers_are_added_to_those_of_other_processes(tmp_path: Path) -> None:
    first, second = (NumberFile(tmp_path / "folder" / "numbers.json", "here") for _ in range(2))
    assert first.read() == {}
    first.add({"a": 1})
    second.add({"b": 0})
    first.add({"a": 2})
    assert first.read() == {"a": 2, "b": 0}
    assert '"place": "here"' in first.path.read_text()


@pytest.mark.parametrize(
    "content",
    ["", "[" * 100_000, "{}", "3", '{"schema": 1, "numbers": {"a": -1}}', '{"schema": 1, "numbers": 3}', "\0",
     '{"schema": 2, "numbers": {}}', '{"schema": 1, "numbers": {"a": 1.5}}'],
)  # fmt: skip
def test_a_broken_file_holds_nothing_and_is_replaced(content: str, tmp_path: Path) -> None:
    file = NumberFile(tmp_path / "numbers.json", "here")
    file.path.write_text(content)
    assert file.read() == {}
    file.add({"a": 1})
    assert file.read() == {"a": 1}


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    NumberFile(tmp_path / "file" / "numbers.json", "here").add({"a": 1})
