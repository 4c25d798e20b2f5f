"""Reads graphs that Triton will run, and makes their code: python -m tests.cuda_codegen.jobs.light '{"kind": "gpt", ...}'

The job's fields: ``kind``, one of `kinds` or a model of `benchmarks.models.codegen`; ``dtype``; ``options`` of Inductor.  Prints a
line of JSON: whether each graph that was read allocates what its code does, bytes of both, and whether the code is the one that
is made without a read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from compile_remat._torch.fake_cuda.installation import install


def main(job: dict[str, Any]) -> dict[str, Any]:
    install()
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonScheduling

    from benchmarks.common.fake_cuda import step
    from benchmarks.common.skeleton import skeleton
    from benchmarks.models import codegen
    from compile_remat.inductor import entry
    from compile_remat.inductor.light_code import reading
    from tests.inductor.light_code.emitting import Step, TorchsOwn, in_order, peak, sources

    timed: list[bool] = []

    def take_no_time(*args: Any, **kwargs: Any) -> tuple[float, str]:
        timed.append(reading._kernels.get() is not None)
        return 1.0, ""

    TritonScheduling.benchmark_codegened_module = take_no_time  # type: ignore[method-assign]
    TritonScheduling.benchmark_fused_nodes = take_no_time  # type: ignore[method-assign]
    asked: list[bool] = []
    AsyncCompile.use_process_pool = classmethod(lambda cls: asked.append(reading._kernels.get() is not None))  # type: ignore[assignment]

    def build() -> tuple[Any, Any]:
        dtype = getattr(torch, job.get("dtype", "float32"))
        if job["kind"] in codegen.CASES:
            case = codegen.build(job["kind"], dtype)
            return case.module, case.inputs
        return kinds()[job["kind"]], (torch.randn(4096, 4096, dtype=dtype, requires_grad=True),)

    def emitted(*, is_read: bool) -> Step:
        seen = Step()

        def use(gm: Any, inputs: Any) -> None:
            watching = {"before_code": seen.light.append} if is_read else {}
            options = job.get("options", {})
            partitioner = TorchsOwn(job.get("ratio", 0.0))
            entry.compile_with_partitioner(
                gm, inputs, partitioner, options, guarded=True, observer=seen.real.append, **watching
            )

        step.compile_step(build, use)
        return seen

    plain, read = emitted(is_read=False), emitted(is_read=True)
    pairs = list(zip(in_order(read.light), in_order(read.real), strict=True))
    text = "\n".join(each.source_code for each in read.real)
    return {
        "graphs": len(pairs),
        "same": [skeleton(light.source_code) == skeleton(real.source_code) for light, real in pairs],
        "bytes": [peak(read.light), peak(read.real)],
        "as_without": sources(read.real) == sources(plain.real),
        "timed": [timed.count(True), timed.count(False)],
        "submitted": [asked.count(True), asked.count(False)],
        "workspaces": text.count("workspace"),
        "loops": text.count("tl.range("),
        "partitions": text.count("\ndef partition_"),
    }


def kinds() -> dict[str, Callable[[Any], Any]]:
    """Functions of one matrix, 4096 x 4096."""
    import torch

    def normalised_twice(x: Any) -> Any:
        """The exponents are stored by the loop of the first sum, and read by that of the second one."""
        y = torch.exp(x.sin())
        first = y / y.sum(-1, keepdim=True)
        return (first * y.cos()).sum(-1).sum() + (first.exp() / first.exp().sum(-1, keepdim=True)).sum()

    def cumulated(x: Any) -> Any:
        """A scan, cut into parts that meet in a workspace."""
        return torch.cumsum(x.sin().flatten(), 0).cos().sum()

    def ordered(x: Any) -> Any:
        return (torch.sort(x.sin()[:, :256], -1).values * x[:, :256]).sum()

    def summed_both_ways(x: Any) -> Any:
        """The gradient of a LayerNorm: sums over rows and over columns of the same matrix in one kernel."""
        rows = x.view(-1, 256)
        y = torch.nn.functional.layer_norm(rows, (256,), rows[0], rows[1])
        return (y * y.sigmoid()).sum()

    return {f.__name__: f for f in (normalised_twice, cumulated, ordered, summed_both_ways)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
