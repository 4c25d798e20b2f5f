"""Files that other processes read while they are written."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compile_remat._util.atomic_write import write_atomically


def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_atomically(path, "old")
    write_atomically(path, "new ä")
    assert path.read_text(encoding="utf-8") == "new ä"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_content_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_atomically(tmp_path / "a.json", "text")
    assert caught.value.filename == str(tmp_path / "a.json"), "not the draft's name, which differs each time"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_a_full_device_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_atomically(Path("/dev/full"), "text")


def test_the_target_of_a_link_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_atomically(pipe, "text")
    reader.join(timeout=30)
    assert found == ["text"] and pipe.is_fifo()


def test_standard_output_is_written_into() -> None:
    program = "from pathlib import Path; from compile_remat._util.atomic_write import write_atomically as write; "
    command = [sys.executable, "-c", program + "write(Path('/dev/stdout'), 'text')"]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"text"
