"""Calls in a process of their own."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.context import SpawnProcess

import pytest

from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.second_process import Receive, started


def told(receive: Receive, text: str) -> tuple[str, int, bool, bool]:
    """What it was given and sent, where it runs, whether Ctrl-C reaches it, and whether the module is imported."""
    os.kill(os.getpid(), signal.SIGINT)
    is_held = signal.SIGINT in signal.sigpending()
    return text + receive(), os.getpid(), is_held, "wave" in sys.modules


def refuse(receive: Receive, text: str) -> None:
    raise ConfigError(text)


def end(receive: Receive) -> None:
    os._exit(3)


def test_it_answers_from_another_process_that_no_interrupt_reaches() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with started("wave") as worker:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        worker.begin(told, "a text, ")
        worker.send("and more")
        text, process, is_held, has_imported = worker.result()
    assert (text, is_held) == ("a text, and more", True) and process == worker.process.pid != os.getpid()
    assert has_imported and not worker.process.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with started("wave") as worker, pytest.raises(ConfigError, match="no such size"):
        worker.begin(refuse, "no such size")
        worker.result()


def test_a_process_that_dies_is_an_error() -> None:
    with started("wave") as worker, pytest.raises(RematError, match="ended with status 3"):
        worker.begin(end)
        worker.process.join()
        worker.send("too late")
        worker.result()


def test_it_ends_with_the_context() -> None:
    with started("wave") as worker:
        time.sleep(0.1)
        assert worker.process.is_alive()  # without a call
    assert not worker.process.is_alive()


def test_an_interrupt_while_it_starts_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored meanwhile, and lost."""
    start, seen = SpawnProcess.start, list[SpawnProcess]()

    def start_interrupted(process: SpawnProcess) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(process)
        seen.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start_interrupted)
    # A shell's background jobs inherit that it is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), started("wave"):
            seen.clear()  # not reached
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 1 and not seen[0].is_alive()
