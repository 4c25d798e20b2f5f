"""Torch's own memory budget: its ratio in force, and its partitioner timed and its choice written down.

Private names of torch, 2.11 to 2.15: `torch._functorch.config.activation_memory_budget`,
`torch._functorch.partitioners.min_cut_rematerialization_partition` and `torch._inductor.custom_graph_pass.CustomPartitionerFn`
(2.11 and 2.12 derive it from `ABC` directly).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx


@contextmanager
def torch_activation_budget(value: float) -> Iterator[None]:
    """Torch's own ratio in force: covers every graph whose *forward* is compiled inside (the choice is made there)."""
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=value):
        yield


@dataclass(frozen=True)
class TorchPartition:
    """Time of torch's partitioner, and names of the joint graph's nodes that the partitioner saves and recomputes."""

    time_ns: int
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]


class PartitionKnownError(Exception):
    """The compilation was stopped: a partition equal to this one was compiled before."""


def timed_torch_partitioner(
    log: list[TorchPartition], is_known: Callable[[TorchPartition], bool] = lambda _: False
) -> object:
    """An Inductor `custom_partitioner_fn` that runs torch's partitioner unchanged and appends to `log`.

    Pass it as `torch.compile(model, options={"custom_partitioner_fn": timed_torch_partitioner(log)})`. If `is_known` returns
    True, the compilation ends with a `PartitionKnownError`, which Dynamo may wrap in an error of its own.
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
