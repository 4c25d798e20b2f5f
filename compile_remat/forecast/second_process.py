"""A process of its own for one call, which ends with the one that asked and says nothing when that is interrupted."""

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
from compile_remat.errors import RematError

Receive = Callable[[], Any]
"""Waits for what the first process sends."""

SECONDS_TO_END = 1.0
"""A process that has given its result gives semaphores back: Python warns of those that one leaves when it is killed."""


@dataclass(frozen=True)
class Surroundings:
    """Paths, folder and environment: how a process finds modules, and what they may look at."""

    path: tuple[str, ...]
    folder: str
    environment: dict[str, str]

    @staticmethod
    def now() -> Surroundings:
        """Returns the surroundings of this process."""
        return Surroundings(tuple(sys.path), os.getcwd(), dict(os.environ))

    def take_up(self) -> None:
        """Make them this process's own."""
        sys.path[:] = self.path
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)


@dataclass(frozen=True)
class Worker:
    """A second process: it takes one call, and what the call waits for, and gives the call's result."""

    process: BaseProcess
    end: Connection

    def begin(self, surroundings: Surroundings, function: Callable[..., object], *args: object) -> None:
        """Let it call the function, which has to be importable, with a `Receive` and these arguments.

        Args:
            surroundings: As they are for the call.  Take them before the user's modules are imported here, which may change them,
                and which the call imports once more.
        """
        self.send((surroundings, pickle.dumps((function, args))))

    def send(self, value: object) -> None:
        """Send what the call waits for; a process that has ended gets nothing, which `result` says."""
        try:
            self.end.send(value)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def result(self) -> Any:
        """Wait for what the call returns.

        Raises:
            RematError: The call raised it, or an error of another kind, which the text names; or the process has ended without
                a result.
        """
        try:
            found, error = self.end.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise RematError(
                f"a second process of the forecast ended with status {self.process.exitcode} and no result"
            ) from None
        self.process.join(SECONDS_TO_END)
        if error is not None:
            raise error
        return found


@contextmanager
def started(imports: str) -> Iterator[Worker]:
    """Start it, and let it import a module while it waits for its call.  It is killed when the context ends."""
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
    """An interrupt inside comes behind it; a process that starts inside gets none, since it inherits what is blocked."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it would let interrupts through again when it starts
    held = list[int]()
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if handler is not None:  # another thread of this process may get the interrupt
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
        function, args = pickle.loads(call)
        found, raised = function(sent.get, *args), None
    except RematError as error:
        found, raised = None, error
    except Exception as error:  # of a module that the first process may not have: it could not be read there
        found, raised = None, RematError(f"{type(error).__name__}: {error}")
    end.send((found, raised))


def _read(end: Connection, sent: SimpleQueue[Any]) -> None:
    """Take what is sent at once: the first process must not wait until the call asks for it."""
    try:
        while True:
            sent.put(end.recv())
    except (EOFError, OSError):  # the first process has ended
        os._exit(1)
