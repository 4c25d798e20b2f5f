"""The cause of an error in a user's model and the user's line, as one line of text."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)', re.MULTILINE)
_GOT = re.compile(r"""got (?P<kind>\w+)\((?P<quote>['"])(?P<text>.*?)(?P=quote),?\)""", re.DOTALL)
_OF_TORCH = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Folders of torch and of this package, and the names of code that has no file."""

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


def cause_text(error: BaseException) -> str:
    """Returns ``RuntimeError: sizes differ (model.py:10: return self.up(x))``: torch's own cause, and the line of the model.

    The line is the last one outside of installed packages; without such a line, the last one outside of torch; else none.
    """
    said, _, user_code = str(error).partition("from user code:")
    frames = [(found["file"], int(found["line"])) for found in _FRAME.finditer(user_code)]
    frames += [] if frames else _frames_of(error)
    return f"{_without_frames(error, said)}{_line_text(frames)}"


def place_text(frames: Iterable[traceback.FrameSummary]) -> str:
    """Returns `` (model.py:10: return self.up(x))`` for the line of the model in a stack, or an empty text."""
    return _line_text([(frame.filename, frame.lineno or 0) for frame in frames])


def _frames_of(error: BaseException) -> list[tuple[str, int]]:
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno or 0)]
    return [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]


def _without_frames(error: BaseException, said: str) -> str:
    name = type(error).__name__
    if name == "DataDependentOutputException":
        return f"the value of a tensor is read, which nothing has without data ({said.strip()})"
    if inner := _GOT.search(said):  # Dynamo's TorchRuntimeError: the error that an operator raised on fake tensors
        return f"{inner['kind']}: {inner['text']}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Hint:", "Developer debug context:", "For more details"))]
    text = error.msg if isinstance(error, SyntaxError) else " ".join(told)
    return f"{name}: {text}" if text else name


def _line_text(frames: Sequence[tuple[str, int]]) -> str:
    known = [frame for frame in frames if not frame[0].startswith(_OF_TORCH)]
    own = [frame for frame in known if not frame[0].startswith(_INSTALLED)]
    if not known:
        return ""
    file, line = (own or known)[-1]
    near = os.path.relpath(file)
    code = linecache.getline(file, line).strip()
    return f" ({file if near.startswith('..') else near}:{line}{f': {code}' if code else ''})"
