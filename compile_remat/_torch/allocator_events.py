"""Private names of torch that measuring and benchmarking need; nothing of ours is imported here.

Checked on torch 2.13.0. Names and where they exist:

- `torch._C._profiler._EventType` and the `experimental_event_tree` of a profile: 2.11 to 2.15.
- `torch._functorch.config.activation_memory_budget` and `.enable_autograd_cache`: 2.11 to 2.15.
- `torch._inductor.config.fx_graph_cache` and `.compile_threads`: 2.11 to 2.15.
- `torch._inductor.custom_graph_pass.CustomPartitionerFn`: 2.11 to 2.15 (2.11 and 2.12 derive it from `ABC` directly).
- `torch._functorch.partitioners.min_cut_rematerialization_partition`: 2.11 to 2.15.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import fx
from torch.profiler import profile


@dataclass(frozen=True)
class AllocationEvent:
    """One call of the allocator: `nbytes` is negative for a free."""

    time_ns: int
    nbytes: int
    address: int


def cpu_allocation_events(profiler: profile) -> list[AllocationEvent]:
    """All allocations and frees of c10's CPU allocator in a finished profile, in time order.

    `torch.profiler` shows them publicly only as sums per operator; the single events are in its event tree.
    """
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    pending: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())
    events = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            events.append(AllocationEvent(event.start_time_ns, fields.alloc_size, fields.ptr))
    return sorted(events, key=lambda event: event.time_ns)


@contextmanager
def torch_activation_budget(value: float) -> Iterator[None]:
    """Torch's own ratio in force: covers every graph whose *forward* is compiled inside (the choice is made there)."""
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=value):
        yield


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Graph caches off, so that every compile really runs its partitioner; kernels built earlier are still found."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def private_compile_caches() -> Iterator[None]:
    """Graph caches off and a new folder for compiled kernels, so that every compile really runs its partitioner.

    The folder is shared by all compiles inside: equal kernels are built once.
    """
    with (
        tempfile.TemporaryDirectory(prefix="remat-bench-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        without_graph_caches(),
    ):
        yield


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Inductor without its pool of compiling processes: starting it takes longer than a few small kernels."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(compile_threads=1):
        yield


@dataclass(frozen=True)
class TorchPartition:
    """What torch's partitioner took, and what it chose: names of nodes of the joint graph."""

    time_ns: int
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]


class PartitionKnownError(Exception):
    """The compilation was stopped: a partition equal to this one was compiled before."""


def timed_torch_partitioner(
    log: list[TorchPartition], is_known: Callable[[TorchPartition], bool] = lambda _: False
) -> object:
    """An Inductor `custom_partitioner_fn` that runs torch's partitioner unchanged and appends to `log`.

    Hand it over as `torch.compile(model, options={"custom_partitioner_fn": timed_torch_partitioner(log)})`. Where `is_known`
    says so, the compilation ends with a `PartitionKnownError`, in whatever Dynamo wraps it.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class TimedPartitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            start_ns = time.perf_counter_ns()
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            log.append(_describe(time.perf_counter_ns() - start_ns, forward, backward, kwargs["num_fwd_outputs"]))
            if is_known(log[-1]):
                raise PartitionKnownError
            return forward, backward

        def uuid(self) -> str:
            return "compile-remat timed torch partitioner"

        def __reduce__(self) -> tuple[type[object], tuple[()]]:
            return (object, ())  # the cache key must not change with the log

        def __deepcopy__(self, memo: object) -> "TimedPartitioner":
            return self

    return TimedPartitioner()


def _describe(time_ns: int, forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> TorchPartition:
    outputs: Any = forward.graph.output_node().args[0]
    in_forward = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    saved = tuple(node.name for node in outputs[num_fwd_outputs:] if isinstance(node, fx.Node))
    recomputed = tuple(
        node.name for node in backward.graph.nodes if node.op == "call_function" and node.name in in_forward
    )
    return TorchPartition(time_ns, saved, recomputed)
