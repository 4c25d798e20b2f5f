"""One call in a process of its own, which ends with the one that asked and says nothing when that is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from compile_remat.errors import RematError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Submitted(Generic[Result]):
    """A call that another process works on."""

    process: BaseProcess
    end: Connection

    def result(self) -> Result:
        """Wait for it.

        Raises:
            RematError: The process has ended without one.
            Exception: What the call raised.
        """
        try:
            found, error = self.end.recv()
        except EOFError:
            self.process.join()
            raise RematError(
                f"a second process of the forecast ended with status {self.process.exitcode} and no result"
            ) from None
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]


@contextmanager
def submitted(function: Callable[..., Result], *args: Any) -> Iterator[Submitted[Result]]:
    """Begin the call, which has to be importable; the process is killed when the context ends."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, function, args), daemon=True)
    with (
        _interrupts_ignored()
    ):  # Ctrl-C goes to all processes of a terminal, and Python's handler would print a traceback
        process.start()
    there.close()
    try:
        yield Submitted(process, here)
    finally:
        process.kill()
        process.join()
        here.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process that starts inside keeps ignoring them; only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(end: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        found, raised = function(*args), None
    except Exception as error:
        found, raised = None, error
    end.send((found, raised))
