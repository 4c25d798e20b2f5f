"""Calls in a process of their own."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.second_process import Receive, Surroundings, started


def told(receive: Receive, text: str) -> tuple[str, int, bool, bool]:
    """Returns the text with the received text, the process id, True if SIGINT is blocked, and True if `wave` is imported."""
    os.kill(os.getpid(), signal.SIGINT)
    is_held = signal.SIGINT in signal.sigpending()
    return text + receive(), os.getpid(), is_held, "wave" in sys.modules


def refuse(receive: Receive, text: str) -> None:
    raise ConfigError(text)


def end(receive: Receive) -> None:
    os._exit(3)


def look_around(receive: Receive) -> tuple[list[str], str, str | None, str | None]:
    """Returns `sys.path`, the working folder, and two environment variables."""
    return sys.path, os.getcwd(), os.environ.get("REMAT_ADDED"), os.environ.get("REMAT_GONE")


def refuse_in_a_way_of_its_own(receive: Receive) -> None:
    class Refused(Exception):
        """An error that no other process can unpickle."""

    raise Refused("no such layer")


def test_it_answers_from_another_process_that_no_interrupt_reaches() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with started("wave") as worker:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        worker.begin(Surroundings.now(), told, "a text, ")
        worker.send("and more")
        text, process, is_held, has_imported = worker.result()
    assert (text, is_held) == ("a text, and more", True) and process == worker.process.pid != os.getpid()
    assert has_imported and not worker.process.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with started("wave") as worker, pytest.raises(ConfigError, match="no such size"):
        worker.begin(Surroundings.now(), refuse, "no such size")
        worker.result()


def test_an_error_that_cannot_be_read_here_is_named() -> None:
    with started("wave") as worker, pytest.raises(RematError, match=r"^Refused: no such layer$"):
        worker.begin(Surroundings.now(), refuse_in_a_way_of_its_own)
        worker.result()


def test_the_call_sees_what_the_first_process_saw_when_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process begins while torch is imported, and before the user's folder is looked into."""
    monkeypatch.setenv("REMAT_GONE", "then")
    with started("wave") as worker:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("REMAT_ADDED", "since then")
        monkeypatch.delenv("REMAT_GONE")
        worker.begin(Surroundings.now(), look_around)
        assert worker.result() == (sys.path, str(tmp_path), "since then", None)


def test_a_process_that_dies_is_an_error() -> None:
    with started("wave") as worker, pytest.raises(RematError, match="ended with exit status 3"):
        worker.begin(Surroundings.now(), end)
        worker.process.join()
        worker.send("too late")
        worker.result()


def test_it_ends_with_the_context() -> None:
    with started("wave") as worker:
        time.sleep(0.1)
        assert worker.process.is_alive()  # without a call
    assert not worker.process.is_alive()


def test_an_interrupt_while_it_starts_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt was ignored meanwhile, and lost."""
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
