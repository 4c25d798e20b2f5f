"""Folders for what torch compiles: all tests share the kernels, and a test may have graph caches of its own.

Inductor writes under ``TORCHINDUCTOR_CACHE_DIR``. Kernels, wrappers and the checks of the CPU's vector instructions are named by
the hash of their source and command line and lie in folders of two characters; torch locks each while it is built. So they may
be shared, also by processes that run at once and by later runs. Graph caches (``fxgraph``, ``aotautograd``) and our side files
(``remat``) lie beside them and decide what is compiled at all: those start empty in every folder that `linked` makes.
"""

from __future__ import annotations

import itertools
from pathlib import Path

DIGITS = "abcdefghijklmnopqrstuvwxyz234567"
"""Of the hashes that name files (base 32)."""


def open_store(folder: Path) -> Path:
    """Make the folder that holds the kernels, or use the one that is there."""
    for name in _names():
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def linked(folder: Path, store: Path) -> Path:
    """Make `folder`, a cache of torch with the kernels of `store` and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _names():
        (folder / name).symlink_to(store / name, target_is_directory=True)
    return folder


def _names() -> list[str]:
    return ["locks", *map("".join, itertools.product(DIGITS, repeat=2))]
