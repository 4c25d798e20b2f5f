"""One progress display for long commands: rich's bar on a terminal if rich is installed, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

SECONDS_BETWEEN_LINES = 5.0
SECONDS_WITH_AN_ESTIMATE = 10.0


class Advance(Protocol):
    """Advances a progress display by `count` units of work."""

    def __call__(self, text: str = "", count: int = 1) -> None:
        """Advance by `count` units; `text` replaces the title, an empty text keeps it."""


@dataclass(frozen=True)
class Display:
    """A progress display on stderr, an `Advance`.

    Attributes:
        advance: Advances it.
        hidden: Returns a context in which it is not drawn, so that results can be printed to stdout.
    """

    advance: Callable[..., None]
    hidden: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self, text: str = "", count: int = 1) -> None:
        """Advance by `count` units; `text` replaces the title, an empty text keeps it."""
        self.advance(text, count)


def about(seconds: float) -> str:
    """Returns `` (about 40 s)`` for the title of work that takes at least 10 seconds by an estimate."""
    if seconds < SECONDS_WITH_AN_ESTIMATE:
        return ""
    return f" (about {seconds:.0f} s)" if seconds < 100 else f" (about {seconds / 60:.0f} min)"


@contextmanager
def progress_bar(title: str, total: int | None, seconds_between: float = SECONDS_BETWEEN_LINES) -> Iterator[Display]:
    """Show progress on stderr; yields the display, to call after each unit of work.

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
            with Progress(console=Console(stderr=True), redirect_stdout=False) as bar:
                task = bar.add_task(title, total=total)

                @contextmanager
                def hidden() -> Iterator[None]:
                    bar.stop()
                    try:
                        yield
                    finally:
                        bar.start()

                yield Display(lambda text, count: bar.update(task, advance=count, description=text or None), hidden)
            return
    yield Display(_lines(title, total, seconds_between))


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
