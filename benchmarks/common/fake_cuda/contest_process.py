"""One point of a contest on the fake device: its code is emitted, and its peak is that of a dry run; it has no times.

Run as a module, in place of `benchmarks.contest.process`, with the same argument; prints the point as a line of JSON.
Private name of torch, 2.11 to 2.15: `torch._functorch.partitioners.functionalize_rng_ops`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from compile_remat._torch.fake_cuda.installation import install

if TYPE_CHECKING:
    from benchmarks.contest.frontier import Point
    from benchmarks.contest.runs import Task


def main(argv: list[str]) -> int:
    install()
    from benchmarks.contest.runs import Task, failure_of, started

    fields = json.loads(argv[0])
    task, start = Task(**fields["task"]), time.perf_counter()
    try:
        point = emitted(task, fields)
    except Exception as error:  # the point says why
        point = replace(started(task), **failure_of(error))
    print(json.dumps(asdict(replace(point, wall_s=round(time.perf_counter() - start, 1)))), flush=True)
    return 0


def emitted(task: Task, fields: Mapping[str, Any]) -> Point:
    """Emit the code of a point for the device that the options name.

    Attention in a checkpointed block is an operator that may draw random numbers, for which torch's partitioner asks the device for
    its generator; without dropout it draws none, and there is no generator here.
    """
    from torch._functorch import partitioners

    from benchmarks.common.fake_cuda import step
    from benchmarks.contest import runs
    from benchmarks.models.large import build_large, checkpointed
    from compile_remat.compilation.region_run import run_region

    def build() -> step.Built:
        sizes = {name: fields[name] for name in ("scale", "seed", "share")}
        case = build_large(fields["name"], device="cuda", **sizes)
        case = checkpointed(case) if task.kind == "checkpoint" else case
        return case.module, case.inputs

    is_ours = task.kind == "remat"
    if is_ours:
        assert task.memory_budget is not None
        use = step.ours(task.memory_budget, device=fields["options"]["device"], **task.options)
    else:
        use = step.torchs(float(task.setting) if task.kind == "torch" else 1.0)
    with mock.patch.object(
        partitioners, "functionalize_rng_ops", lambda joint, forward, backward, _: (forward, backward)
    ):
        peak_bytes = run_region(*step.compile_step(build, use)[-2:]).peak_bytes
    return replace(runs.started(task), peak_bytes=peak_bytes, **(runs.reported() if is_ours else {}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
