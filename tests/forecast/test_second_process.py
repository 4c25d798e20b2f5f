"""Calls in a process of their own."""

from __future__ import annotations

import os
import signal

import pytest

from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.second_process import submitted


def told(text: str) -> tuple[str, int, bool]:
    """What it was given, where it runs, and whether it ignores Ctrl-C."""
    return text, os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def refuse(text: str) -> None:
    raise ConfigError(text)


def end() -> None:
    os._exit(3)


def test_it_answers_from_another_process_that_ignores_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with submitted(told, "a text") as call:
        assert signal.getsignal(signal.SIGINT) is before
        text, process, ignores = call.result()
    assert (text, ignores) == ("a text", True) and process == call.process.pid != os.getpid()
    assert not call.process.is_alive()


def test_what_it_raises_is_raised_here() -> None:
    with submitted(refuse, "no such size") as call, pytest.raises(ConfigError, match="no such size"):
        call.result()


def test_a_process_that_dies_is_an_error() -> None:
    with submitted(end) as call, pytest.raises(RematError, match="ended with status 3"):
        call.result()


def test_it_ends_with_the_context() -> None:
    with submitted(signal.pause) as call:
        assert call.process.is_alive()
    assert not call.process.is_alive()
