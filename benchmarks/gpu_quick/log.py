"""The output of a session, kept in a file as well, and its end by a signal."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import TextIOBase
from pathlib import Path
from typing import TextIO


class _Both(TextIOBase):
    def __init__(self, screen: TextIO, file: TextIO) -> None:
        self._screen, self._file = screen, file

    def write(self, text: str) -> int:
        self._file.write(text)
        self._file.flush()  # the machine may go away at any time
        return self._screen.write(text)

    def flush(self) -> None:
        self._screen.flush()


@contextmanager
def kept_in(path: Path) -> Iterator[TextIO]:
    """Append all that the body prints to a file; returns the file, for what goes nowhere else."""
    with (
        path.open("a", encoding="utf-8") as file,
        redirect_stdout(_Both(sys.stdout, file)),
        redirect_stderr(_Both(sys.stderr, file)),
    ):
        yield file


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Make SIGTERM, by which machines are taken back, a `KeyboardInterrupt`, so that what is measured is concluded."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
