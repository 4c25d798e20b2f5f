"""One row of `benchmarks.emitted`, in a process that has the fake device.

Run as a module; its arguments are a row without figures as JSON, and the file of the device.  Prints the row as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from compile_remat._torch.fake_cuda.installation import install

if TYPE_CHECKING:
    from benchmarks.emitted import EmittedRow


def main(argv: list[str]) -> int:
    install()
    from benchmarks.emitted import EmittedRow

    print(json.dumps(asdict(made(EmittedRow(**json.loads(argv[0])), argv[1]))), flush=True)
    return 0


def made(blank: EmittedRow, device: str) -> EmittedRow:
    """Emit the code of one setting, planned for a device by name or file; if that fails, the row says why."""
    import torch

    import compile_remat
    from benchmarks.common import harness
    from benchmarks.common.fake_cuda import step, traffic
    from benchmarks.models.building import converted
    from benchmarks.models.large import EMITTED
    from compile_remat.compilation.region_run import run_region

    def build() -> step.Built:
        module, inputs = EMITTED[blank.model](blank.scale)
        converted(module, torch.bfloat16)
        return module.train(), tuple(v[: max(1, len(v) // 4)].clone() for v in inputs)

    setting, use = blank.setting, step.torchs(1.0)
    if setting.startswith("torch "):
        use = step.torchs(float(setting.split()[1]))
    elif setting != "plain":
        budget = setting if setting in ("min", "max") else int(float(setting))
        use = step.ours(budget, device=device, slices=blank.slices, **blank.host_settings)
    try:
        with traffic.recorded(guarded=blank.guarded) as found:
            emitted = step.compile_step(build, use)
    except Exception as error:  # the row says why
        return replace(blank, failure=harness.reason_of(error))
    counts = {f"{kind}s": found.count(kind) for kind in ("product", "attention")}
    row = replace(
        blank,
        **counts,
        other=found.count("other"),
        fused=found.count("fused"),
        families=found.families(),
        refused={("forward", "backward")[is_backward]: dict(each) for is_backward, each in found.refused.items()},
        peak_bytes=run_region(*emitted[-2:]).peak_bytes,
    )
    reports = compile_remat.reports()
    if not reports or reports[-1].plan is None:
        return row
    report = reports[-1]
    plan = report.plan
    return replace(
        row,
        predicted_peak_bytes=report.predicted_peak_bytes,
        extra_time_ns=plan.extra_time_ns,
        time_ns=plan.time_ns,
        sliced=plan.slices_text,
        offloaded_bytes=plan.offloaded_bytes,
        stall_ns=plan.stall_time_ns,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
