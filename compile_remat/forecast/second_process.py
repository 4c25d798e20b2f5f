"""A second process for one call, which ends with the first process and prints nothing when that is interrupted."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from compile_remat._util.collector import collector_paused
from compile_remat._util.log_output import torch_is_quiet
from compile_remat.errors import RematError

Receive = Callable[[], Any]
"""Waits for the next value that the first process sends, and returns it."""

SECONDS_TO_END = 1.0
"""Time that a process has, after its result, to release semaphores: Python warns of semaphores that a killed process leaves."""


@dataclass(frozen=True)
class Surroundings:
    """Import paths, working folder and environment of a process."""

    path: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    @staticmethod
    def now() -> Surroundings:
        """Returns the surroundings of this process."""
        return Surroundings(tuple(sys.path), os.getcwd(), dict(os.environ))

    def take_up(self) -> None:
        """Set them in this process."""
        sys.path[:] = self.path
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)


@dataclass(frozen=True)
class Worker:
    """A second process: runs one call, passes values to it, and returns its result."""

    process: BaseProcess
    end: Connection

    def begin(self, surroundings: Surroundings, function: Callable[..., object], *args: object) -> None:
        """Let the process call the function, which must be importable, with a `Receive` and these arguments.

        Args:
            surroundings: The surroundings of the call.  Take them before this process imports the user's modules, which may change
                the surroundings, and which the call imports again.
        """
        self.send((surroundings, pickle.dumps((function, args))))

    def send(self, value: object) -> None:
        """Send a value to the call; if the process has ended, nothing is sent, and `result` reports the end."""
        try:
            self.end.send(value)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def result(self) -> Any:
        """Wait for the result of the call and return it.

        Raises:
            RematError: The call raised this error, or another one, which the text names; or the process ended without a result.
        """
        try:
            found, error = self.end.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RematError(
                f"a second process of the forecast ended with exit status {self.process.exitcode} and no result"
            ) from None
        self.process.join(SECONDS_TO_END)
        if error is not None:
            raise error
        return found


@contextmanager
def started(imports: str) -> Iterator[Worker]:
    """Start a second process, which imports a module while it waits for its call.  The end of the context kills the process."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, imports), daemon=True)
    try:
        with _interrupts_held():  # Ctrl-C goes to all processes of a terminal; Python's handler would print a traceback
            process.start()
        there.close()
        yield Worker(process, here)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        here.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay interrupts until the context ends; a process that starts inside inherits the signal mask and gets no interrupts."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # the start of the tracker would unblock interrupts again
    held = list[int]()
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is not None:  # another thread of this process may receive the interrupt
        signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _work(end: Connection, imports: str) -> None:
    sent = SimpleQueue[Any]()
    threading.Thread(target=_read, args=(end, sent), daemon=True).start()
    try:
        with collector_paused():
            importlib.import_module(imports)
        surroundings, call = sent.get()
        surroundings.take_up()
        with torch_is_quiet():
            function, args = pickle.loads(call)
            found, raised = function(sent.get, *args), None
    except RematError as error:
        found, raised = None, error
    except Exception as error:  # the first process may lack the module of its class, and could not unpickle it
        found, raised = None, RematError(f"{type(error).__name__}: {error}")
    end.send((found, raised))


def _read(end: Connection, sent: SimpleQueue[Any]) -> None:
    """Read values as soon as they arrive, so that the first process never blocks until the call reads them."""
    try:
        while True:
            sent.put(end.recv())
    except (EOFError, OSError):  # the first process has ended
        os._exit(1)
