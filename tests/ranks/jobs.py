"""Jobs of the ranks of `tests.ranks.test_training`, each function in a process group of its own."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import compile_remat
from compile_remat._torch.ranks.groups import communicates
from compile_remat.device import free_memory
from compile_remat.device.measure import recorded
from compile_remat.errors import BudgetError, RankError
from compile_remat.partitioning import partitioner
from compile_remat.partitioning.joint_split import split
from compile_remat.passes.problem.plan import Offloaded
from compile_remat.planning import settings
from compile_remat.ranks import board as board_module
from compile_remat.ranks.wrappers import Held, held_by, held_by_running
from compile_remat.runtime.oom_recovery import OomRecovery
from tests.ranks.gloo import waiting_for_threads
from tests.ranks.models import ROWS, WIDTH, Seen, Stack, trained, wrapped

MIB = 1 << 20
LARGE_ROWS = 64 * ROWS
CAPACITY_BYTES = 64 * MIB
"""Capacity of the device; at this size `auto` is rounded down to whole MiB."""


def trained_within(rank: int, wrapper: str, options: dict[str, Any], free_bytes: list[int]) -> tuple[Seen, list[Held]]:
    """The same as `trained` where so many bytes of `CAPACITY_BYTES` are free on each rank, and what `auto` knows of the wrapper."""
    known: list[Held] = []

    def noting() -> Held | None:
        held = held_by_running()
        known.extend([] if held is None else [held])
        return held

    resident = mock.patch.object(free_memory, "resident_bytes", lambda: CAPACITY_BYTES - free_bytes[rank])
    host = mock.patch.object(free_memory, "host_free_bytes", lambda: 1 << 40)
    with resident, host, mock.patch.object(settings, "held_by_running", noting):
        return trained(rank, wrapper, options), known


def moving(rank: int, free_bytes: list[int]) -> tuple[Seen, list[Offloaded]]:
    """Steps of DDP whose saved tensors may leave for a host of which each rank sees other free memory, and what leaves."""
    options = {
        "memory_budget": "min",
        "compiler": "eager",
        "offload": "auto",
        "device": "h100-sxm",
        "host_memory": "50%",
    }
    with mock.patch.object(settings, "host_free_bytes", lambda: free_bytes[rank]):
        seen = trained(rank, "ddp", options, LARGE_ROWS)
    return seen, [each for report in compile_remat.reports() if report.plan for each in report.plan.offloaded]


def order_of_gradients(rank: int, compiler: str) -> list[int]:
    """The numbers of the parameters in the order in which their gradients leave the backward, on data of the rank's own."""
    torch.manual_seed(0)
    model = Stack()
    order: list[int] = []
    for k, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, k=k: order.append(k))
    torch.manual_seed(rank)
    options = {"memory_budget": "min", "gradients": "early", "compiler": compiler}
    torch.compile(model, backend="remat", options=options)(torch.randn(ROWS, WIDTH)).backward()
    return order


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
    """The number of graphs compiled by each step's end, with sizes of each rank's own: rank 1 may compile when others do not."""
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
    """For each report, True if it came from torch's cache; and the saved values, if only some ranks have the cache."""
    cache = Path(folder) / ("full" if cached[rank] else f"empty{rank}")
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache)):
        trained(rank, "ddp", {"memory_budget": "min"}, ROWS)
    found = compile_remat.reports()
    return [report.from_cache for report in found], [report.plan.saved for report in found if report.plan]


def trained_beside_a_late_rank(rank: int, options: dict[str, Any]) -> list[str]:
    """The warnings of rank 0, which compiles a graph that rank 1 has not."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            torch.compile(Stack(), backend="remat", options=options)(torch.randn(ROWS, WIDTH)).backward()
            board = board_module.current_board()
            assert board is not None and board.silent == {1}
        torch.distributed.barrier()
    return [str(w.message) for w in caught if "rank_timeout" in str(w.message)]


def collectives(rank: int, budget: str, is_checkpointed: bool) -> tuple[int, int, int]:
    """The number of collectives in a joint graph and in the two graphs of its plan, and of values that are computed twice."""
    found: list[int] = []

    def counting(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        before = _num_collectives(joint)
        forward, backward = split(joint, *args, **kwargs)
        found.extend((before, _num_collectives(forward) + _num_collectives(backward)))
        return forward, backward

    options = {"memory_budget": budget, "compiler": "eager"}
    with mock.patch.object(partitioner, "split", counting):
        wrapped("tp", options, is_checkpointed=is_checkpointed)(torch.randn(ROWS, WIDTH)).backward()
    (report,) = compile_remat.reports()
    joint, both = found
    return joint, both, report.num_recomputed or 0


def _num_collectives(gm: fx.GraphModule) -> int:
    return sum(
        "c10d" in getattr(node.target, "namespace", "") and "wait" not in str(node.target) for node in gm.graph.nodes
    )


def out_of_memory(rank: int, wrapper: str, place: str) -> tuple[str, list[str], int]:
    """Rank 1 alone runs out of memory in the second step: returns a rank's error, its notes, and the number of reports.

    Args:
        place: `forward` or `backward`.
    """
    options = {"memory_budget": "max", "compiler": "eager"}
    shared = torch.compile(Shared(), backend="remat", options=options)
    model, x = shared if wrapper == "collective" else wrapped(wrapper, options), torch.randn(ROWS, WIDTH)
    model(x).backward()
    original = getattr(OomRecovery, place)
    failures = [torch.OutOfMemoryError("out of memory, said the test")] * (rank == 1)

    def failing(self: OomRecovery, call: Any, run: Any, *args: Any) -> Any:
        def run_once(*given: Any) -> Any:
            found = run(*given) if wrapper == "collective" else None  # then rank 0 gets what it waits for
            if failures:
                raise failures.pop()
            return run(*given) if found is None else found

        return original(self, call, run_once, *args)

    error, notes = "", []
    with mock.patch.object(OomRecovery, place, failing):
        try:
            loss = model(x)
            if wrapper == "ddp":
                loss.backward()
        except torch.OutOfMemoryError as found:
            error, notes = type(found).__name__, found.__notes__
    return error, notes, len(compile_remat.reports())


class Shared(Stack):
    """A stack on data that all ranks scale by the mean of all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x - all_reduce(x.mean(0), "avg", torch.distributed.group.WORLD))
        return loss


def told_by(rank: int, wrapper: str) -> list[bool]:
    """For each graph of a wrapped model, True if it is found to communicate."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(communicates(gm, example_inputs))
        return gm

    model = Shared() if wrapper == "collective" else wrapped(wrapper, None)
    torch.compile(model, backend=backend)(torch.randn(ROWS, WIDTH)).backward()
    return found


def hang(rank: int) -> None:
    """Rank 0 waits for a rank that never comes."""
    if rank == 0:
        torch.distributed.barrier()
    else:
        time.sleep(60)


@dataclass(frozen=True)
class Measured:
    """Bytes that a wrapper holds, predicted and measured.

    Attributes:
        predicted: By the formula, without what graphs hold but their gradients.
        least: The least of the measured peaks of some steps: under DDP, threads of gloo let go of a bucket when they come to it.
        coming: Bytes still to be allocated in each forward, by the formula; -1 if unknown.
    """

    predicted: Held
    least: int
    coming: list[int]


def measured_wrapper(rank: int, wrapper: str, stays: bool | None, dtype: torch.dtype | None) -> Measured:
    """Steps on one row, in which a wrapper holds far more than activations."""
    torch.manual_seed(0)
    model: nn.Module = Stack(4, 2 * WIDTH)
    base = 0
    if wrapper == "ddp":
        with recorded("cpu") as peaks:
            # without the first synchronisation, whose buffer a thread of gloo may free
            model = nn.parallel.DistributedDataParallel(model, init_sync=False)
        base = peaks[0].end_bytes
    else:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
        reshards = None if stays is None else not stays
        for part in [*(model.blocks if wrapper == "blocks" else ()), model]:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshards, mp_policy=policy)
    predicted = held_by(model)
    assert predicted is not None
    coming: list[int] = []

    def note(*_: Any) -> None:
        found = held_by_running()
        coming.append(-1 if found is None else found.coming_bytes)

    module = model.module if wrapper == "ddp" else model
    module.blocks[-1].register_forward_hook(note)
    measured = []
    for _ in range(20 if wrapper == "ddp" else 3):  # gloo lets go of a bucket of DDP late on a busy machine
        with waiting_for_threads(), recorded("cpu") as peaks:
            model(torch.randn(1, 2 * WIDTH)).backward()
        measured.append(base + peaks[0].peak_bytes)
        for parameter in model.parameters():
            parameter.grad = None
    return Measured(predicted, min(measured), coming)
