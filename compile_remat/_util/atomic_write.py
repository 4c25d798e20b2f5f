"""Writes files that other processes may read at the same time."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` and create its folders; a reader sees the old content or the new, never a part of it.

    The target of a link is replaced, not the link.  A device or a pipe is written into, as it has no old content to keep.

    Raises:
        OSError: The file cannot be written; `filename` is `path`, and `strerror` has the cause.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_bytes(data)  # not resolved: /dev/stdout may lead to a pipe, which has no path
        else:
            _replace(path.resolve(), data)
    except OSError as error:  # it names the draft, which no caller knows, or no file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
