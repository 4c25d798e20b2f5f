"""One progress display for long commands: rich's bar on a terminal if rich is installed, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS_BETWEEN_LINES = 5.0


class Advance(Protocol):
    """Advances a progress display by `count` units of work."""

    def __call__(self, text: str = "", count: int = 1) -> None:
        """Advance by `count` units; `text` replaces the title, an empty text keeps it."""


@contextmanager
def progress_bar(title: str, total: int | None, seconds_between: float = SECONDS_BETWEEN_LINES) -> Iterator[Advance]:
    """Show progress on stderr; yields a function to call after each unit of work.

    Args:
        total: Units of work; None if unknown.
        seconds_between: Without a bar, at most one line is printed in this time, besides the first and the last one.
    """
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task(title, total=total)
                yield lambda text="", count=1: bar.update(task, advance=count, description=text or None)
            return
    yield _lines(title, total, seconds_between)


def _lines(title: str, total: int | None, seconds_between: float) -> Callable[..., None]:
    done, last = 0, -seconds_between

    def advance(text: str = "", count: int = 1) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if now - last >= seconds_between or (count and done == total):
            last = now
            counted = "" if total is None else f": {done} of {total}"
            print(f"{text or title}{counted}", file=sys.stderr, flush=True)

    return advance
