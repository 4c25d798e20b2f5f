"""Warnings that point at a line of the user's program, and come once in a process for one text; all of ours are given here.

A warning is found many calls deep: below Dynamo, AOTAutograd and Inductor, which also reset Python's own record of the warnings
that were shown.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import NamedTuple

Said = tuple[str, type[Warning]]

INSIDE = frozenset(sys.stdlib_module_names) | {"compile_remat", "torch", "functorch", "torchgen"}
"""Top packages whose frames are not the user's program; generated code, which has no module name, is not, either."""

PREFIX = "compile_remat: "

_SAID: set[Said] = set()
_HELD: ContextVar[list[Said] | None] = ContextVar("compile_remat held warnings", default=None)


class Place(NamedTuple):
    """A line of a program."""

    filename: str
    line: int
    module: str


NOWHERE = Place("<compile_remat>", 1, "compile_remat")
_COMPILED_AT: list[Place] = [NOWHERE]
"""The line that compiled last: the place of a warning in a thread of autograd, or at exit, where no call of the user is active."""


def place_of_user() -> Place | None:
    """Returns the innermost line outside of this package, torch and Python's library; None if no such call is active."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__") or "")
        if module and module.partition(".")[0] not in INSIDE:
            return Place(frame.f_code.co_filename, frame.f_lineno, module)
        frame = frame.f_back
    return None


def note_compilation() -> None:
    """Keep the user's line that is active now, as the place of later warnings that have no other."""
    _COMPILED_AT[:] = [place_of_user() or _COMPILED_AT[0]]


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the user's line, once in a process for one text; inside of `held_warnings` keep the warning for later."""
    held = _HELD.get()
    if held is not None:
        held.append((text, category))
    elif (text, category) not in _SAID:
        place = place_of_user() or _COMPILED_AT[0]
        warnings.warn_explicit(text, category, place.filename, place.line, place.module)
        _SAID.add((text, category))  # not if a filter has made it an error: then it is raised each time


@contextmanager
def held_warnings() -> Iterator[list[Said]]:
    """Keep the warnings of this context in a list, for `warn_user` if what they are about is taken; they are not given yet."""
    held: list[Said] = []
    token = _HELD.set(held)
    try:
        yield held
    finally:
        _HELD.reset(token)


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Print the warnings of this context to stderr at its end, as a command does: there is no line of a program to point at."""
    with held_warnings() as held:
        try:
            yield
        finally:
            for text in dict.fromkeys(text for text, _ in held):
                print(f"warning: {text.removeprefix(PREFIX)}", file=sys.stderr)


@contextmanager
def torchs_hidden() -> Iterator[None]:
    """Show no warnings that point into torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        yield


def drop_held(note: str) -> None:
    """Drop the held warnings that a note, which has just been printed, says as well."""
    held = _HELD.get() or []
    held[:] = [each for each in held if each[0].removeprefix(PREFIX) not in note]


def forget_warnings() -> None:
    """Let every warning come once more, as in a new process."""
    _SAID.clear()
    _COMPILED_AT[:] = [NOWHERE]
