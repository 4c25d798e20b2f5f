"""Emits the toy's Triton code on the fake device: python -m tests.cuda_codegen.jobs.emit '{"budget": "min", ...}'

The job's fields: ``budget``; ``dtype``; ``dropout``; ``compiled`` (kernels go to cubins); ``unguarded``: Inductor joins what
it wants; ``options`` of Inductor; ``out``, a file for what was emitted.  Prints one line of JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from compile_remat._torch.fake_cuda.installation import install


def main(job: dict[str, Any]) -> dict[str, Any]:
    install(compiled=job.get("compiled", False))
    import torch

    import compile_remat
    from benchmarks.common.fake_cuda import step
    from benchmarks.models.building import converted
    from compile_remat.inductor import entry
    from tests.cuda_codegen import toys

    if job.get("unguarded"):
        entry.under_guard = lambda compiler, **_: compiler
    set_to: list[object] = []
    torch.cuda.set_device = set_to.append
    binaries = binaries_of_triton()

    def build() -> tuple[Any, Any]:
        module, inputs = toys.make(toys.drop if job.get("dropout") else None)
        converted(module, getattr(torch, job.get("dtype", "float32")))
        return module, inputs

    emitted = step.compile_step(build, step.ours(job["budget"], job.get("options")))
    (report,) = compile_remat.reports()
    if "out" in job:
        parts = [(e.source_code, e.names, e.num_outputs) for e in emitted]
        Path(job["out"]).write_bytes(pickle.dumps(parts))
    sources = "\n".join(e.source_code for e in emitted)
    return {
        "set_device": len(set_to),
        "graphs": len(emitted),
        "predicted": report.predicted_peak_bytes,
        "scheduled": report.scheduled_peak_bytes,
        "saved": len(report.plan.saved) if report.plan is not None else None,
        "triton_kernels": sources.count("async_compile.triton("),
        "cuda_buffers": sources.count("empty_strided_cuda("),
        "cpu_buffers": sources.count("empty_strided_cpu("),
        "multi_kernels": sources.count("async_compile.multi_kernel("),
        "partitions": sources.count("\ndef partition_"),
        "cubins": len(set(binaries)),
    }


def binaries_of_triton() -> list[bytes]:
    """The list that every cubin goes to from now on; Inductor deletes the folder that it compiled in."""
    import triton

    binaries: list[bytes] = []
    compile_kernel = triton.compile

    def compile_and_keep(*args: Any, **kwargs: Any) -> Any:
        kernel = compile_kernel(*args, **kwargs)
        binaries.append(kernel.asm["cubin"])
        return kernel

    triton.compile = compile_and_keep
    return binaries


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
