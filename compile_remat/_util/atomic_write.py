"""Writes files that other processes may read at the same time."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` and create its folders; a reader sees the old content or the new, never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
