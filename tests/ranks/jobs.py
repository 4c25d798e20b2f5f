"""What the ranks of `tests.ranks.test_training` do, each function in a process group of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import compile_remat
from compile_remat.device import free_memory
from compile_remat.errors import BudgetError, RankError
from compile_remat.ranks import board as board_module
from tests.ranks.models import ROWS, WIDTH, Seen, Stack, trained

MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
"""So that `auto` is rounded down to whole MiB."""


def trained_within(rank: int, wrapper: str, options: dict[str, Any], free_bytes: list[int]) -> Seen:
    """The same as `trained` where so many bytes of `CAPACITY_BYTES` are free on each rank when `auto` asks."""
    resident = mock.patch.object(free_memory, "resident_bytes", lambda: CAPACITY_BYTES - free_bytes[rank])
    host = mock.patch.object(free_memory, "host_free_bytes", lambda: 1 << 40)
    with resident, host:
        return trained(rank, wrapper, options)


def error_of(rank: int, options: list[dict[str, Any]], rows: list[int]) -> tuple[str, str, tuple[int, ...]]:
    """The error of a first step under options and sizes of each rank's own: its type, its text, and the ranks it names."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Stack())
    try:
        torch.compile(model, backend="remat", options=options[rank])(torch.randn(rows[rank], WIDTH)).backward()
    except (BudgetError, RankError) as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    return "", "", ()


def sizes_of_its_own(rank: int, rows: list[list[int]]) -> list[int]:
    """How many graphs are compiled after each step, with sizes of each rank's own: rank 1 may compile where the others do not."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Stack())
    options = {"memory_budget": "auto", "capacity": "8GiB", "compiler": "eager"}
    step = torch.compile(model, backend="remat", options=options)
    found = []
    for each in rows[rank]:
        step(torch.randn(each, WIDTH)).backward()
        found.append(len(compile_remat.reports()))
    return found


def trained_from_cache(rank: int, folder: str, cached: list[bool]) -> tuple[list[bool], list[tuple[str, ...]]]:
    """Whether each report came from torch's cache, and the plans, where some ranks have the cache and others do not."""
    cache = Path(folder) / ("full" if cached[rank] else f"empty{rank}")
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache)):
        trained(rank, "ddp", {"memory_budget": "min"}, ROWS)
    found = compile_remat.reports()
    return [report.from_cache for report in found], [report.plan.saved for report in found if report.plan]


def trained_beside_a_late_rank(rank: int, options: dict[str, Any]) -> list[str]:
    """What rank 0 is warned of, which compiles a graph that rank 1 has not."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            torch.compile(Stack(), backend="remat", options=options)(torch.randn(ROWS, WIDTH)).backward()
            board = board_module.current_board()
            assert board is not None and board.silent == {1}
        torch.distributed.barrier()
    return [str(w.message) for w in caught if "rank_timeout" in str(w.message)]


def hang(rank: int) -> None:
    """Rank 0 waits for a rank that never comes."""
    if rank == 0:
        torch.distributed.barrier()
    else:
        time.sleep(60)
