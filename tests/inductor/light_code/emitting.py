"""Compiles a training step twice over: read before its code is made, and the code itself.  Nothing is built or run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config

from benchmarks.common.code_only import without_compiler
from benchmarks.common.skeleton import skeleton
from compile_remat.compilation.region_run import RegionRun, run_region
from compile_remat.inductor.entry import CustomPartitionerFn, compile_with_partitioner
from compile_remat.inductor.observe import Emitted


class TorchsOwn(CustomPartitionerFn):
    """Torch's own choice at an ``activation_memory_budget``: 0 recomputes all that it can."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=self.ratio):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> object:
        return ("torch's own", self.ratio)


class Refused(Exception):
    """The error with which the tests refuse a graph."""


@dataclass
class Step:
    """Code of one training step, graphs in the order in which they were compiled.

    Attributes:
        light: The graphs as read before Inductor made code.
        real: The code that Inductor made.
    """

    light: list[Emitted] = field(default_factory=list)
    real: list[Emitted] = field(default_factory=list)

    def check(self, *, is_understood: bool = True) -> None:
        """Assert that `light` allocates the same as `real`: the same statements, and the same peak.

        Args:
            is_understood: True if a dry run can follow the code.
        """
        assert len(self.light) == len(self.real) == 2
        for read, made in zip(in_order(self.light), in_order(self.real), strict=True):
            assert skeleton(read.source_code) == skeleton(made.source_code)
        if is_understood:
            assert peak(self.light) == peak(self.real) > 0


def in_order(graphs: Sequence[Emitted]) -> list[Emitted]:
    """Forward, then backward: where a graph is read, its backward is compiled inside of the forward's lowering."""
    return sorted(graphs, key=lambda each: each.is_backward)


def peak(graphs: Sequence[Emitted]) -> int:
    """Peak bytes of a forward and a backward."""
    run: RegionRun = run_region(*in_order(graphs))
    return run.peak_bytes


def compiled(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    ratio: float = 0.0,
    guarded: bool = True,
    is_read: bool = True,
    refused: str = "",
    dynamic: bool | None = False,
    options: Mapping[str, Any] | None = None,
) -> Step:
    """Compile one step.

    Args:
        ratio: Part that torch's own partitioner saves, from 0 to 1.
        is_read: True if graphs are read before code is made.
        refused: ``forward`` or ``backward``: the graph that is refused when it has been read.
    """
    step = Step()

    def before_code(emitted: Emitted) -> None:
        step.light.append(emitted)
        if refused == ("backward" if emitted.is_backward else "forward"):
            raise Refused

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        watching = {"before_code": before_code} if is_read else {}
        partitioner = TorchsOwn(ratio)
        try:
            compile_with_partitioner(
                gm, example_inputs, partitioner, options or {}, guarded=guarded, observer=step.real.append, **watching
            )
        except Exception as error:
            if not refused or not _comes_of_refusal(error):
                raise
        return gm.forward

    torch.compiler.reset()
    with without_compiler(), dynamo_config.patch(capture_scalar_outputs=True), inductor_config.patch(compile_threads=1):
        torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return step


def _comes_of_refusal(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, Refused):
        error = error.__cause__ or error.__context__
    return error is not None


def sources(graphs: Sequence[Emitted]) -> list[str]:
    """The codes without what counts compilations, and without the folders that kernels lie in."""
    codes = [part.source_code.partition("\n")[2] for part in in_order(graphs)]
    return [re.sub(r"(?m)^# kernel path: .*/", "# kernel path: ", code) for code in codes]
