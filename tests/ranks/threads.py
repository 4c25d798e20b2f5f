"""Ranks as threads that share a store in memory: for what needs no process group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from compile_remat.ranks.board import Board


def boards(size: int) -> list[Board]:
    """One for each rank, in a new store."""
    store = torch.distributed.HashStore()
    return [Board(store, rank, size) for rank in range(size)]


def on_all(found: list[Board], job: Callable[[Board], Any]) -> list[Any]:
    """Returns each rank's result, or the error that its job raises; all jobs run at the same time."""

    def attempt(board: Board) -> Any:
        try:
            return job(board)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(attempt, found))
