"""Ranks as processes of a gloo group on this machine: they stay for several jobs, and a job that hangs ends in an error."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from tests import cpu_time

TIMEOUT_S = 120.0
"""For a job on all ranks: some 20 times what the longest one takes on an idle machine."""


class JobError(Exception):
    """A rank raised an unexpected error; the text is its traceback."""


class Ranks:
    """Processes that run a job at the same time, each job in a process group of its own.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="remat-ranks-")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, rank, size), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)
        for end, process in zip(self._ends, self._processes, strict=True):
            self._note(process, end.recv())  # it has imported torch
        self._jobs = 0

    def __call__(self, job: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Returns ``job(rank, *args)`` of each rank; `job` must be a function of a module.

        Raises:
            JobError: The job raised on a rank, or did not end in time.
        """
        self._jobs += 1
        store = Path(self._folder.name) / f"store{self._jobs}"
        for end in self._ends:
            end.send((job, args, str(store)))
        found = []
        for rank, (end, process) in enumerate(zip(self._ends, self._processes, strict=True)):
            if not end.poll(timeout_s):
                self.close()
                raise JobError(f"rank {rank} of {self.size} did not end in {timeout_s:g} s: a hang")
            result, error, spent = end.recv()
            self._note(process, spent)
            found.append((result, error))
        if errors := [error for _, error in found if error]:
            raise JobError("\n".join(errors))
        return [result for result, _ in found]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            cpu_time.RUNNING.pop(process.pid or 0, None)
        self._folder.cleanup()

    @staticmethod
    def _note(process: SpawnProcess, spent: cpu_time.CpuTime) -> None:
        cpu_time.RUNNING[process.pid or 0] = spent


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    """So many processes, for as long as the context lasts."""
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _work(end: Connection, rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    import torch

    torch.set_num_threads(1)
    end.send(cpu_time.so_far())
    while True:
        job, args, store = end.recv()
        result, error = None, ""
        try:
            result = _in_group(job, args, rank, size, store)
        except Exception:
            error = f"rank {rank}: {traceback.format_exc()}"
        end.send((result, error, cpu_time.so_far()))


def _in_group(job: Callable[..., Any], args: Any, rank: int, size: int, store: str) -> Any:
    import torch

    from compile_remat.planning.plain_peaks import forget_plain_peaks
    from compile_remat.runtime.process_state import clear_process_state

    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return job(rank, *args)
    finally:
        distributed.destroy_process_group()
        torch.compiler.reset()
        clear_process_state()
        forget_plain_peaks()
