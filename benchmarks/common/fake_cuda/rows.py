"""Rows of `benchmarks.cuda_codegen`, one after the other, in a process that has the fake device.

Run as a module; its arguments are ``MODEL DTYPE [--plain BYTES] SETTING ...``.  Prints one line of JSON for each setting:
``torch 0.5`` is torch's partitioner at that ``activation_memory_budget``, ``0.5`` ours at half of what torch's own needs at 1.0,
which is the first setting or given by `--plain`, ``min`` ours at its lowest peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from compile_remat._torch.fake_cuda.installation import install

if TYPE_CHECKING:
    from benchmarks.cuda_codegen import CodegenRow

PLAIN = "torch 1"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rows", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("dtype")
    parser.add_argument("--plain", type=int, default=0)
    parser.add_argument("settings", nargs="+")
    arguments = parser.parse_args(argv)
    install()
    for row in rows(arguments.model, arguments.dtype, arguments.settings, arguments.plain):
        print(json.dumps(asdict(row)), flush=True)
    return 0


def rows(model: str, dtype: str, settings: Sequence[str], plain_bytes: int) -> Iterator[CodegenRow]:
    """A row for each setting; a row that fails says why."""
    from dataclasses import replace

    from benchmarks.common import harness
    from benchmarks.cuda_codegen import CodegenRow

    known: dict[Any, CodegenRow] = {}
    for setting in settings:
        base = CodegenRow(model, dtype, setting)
        try:
            if setting.startswith("torch "):
                row = _torchs_row(base, float(setting.split()[1]), known)
            else:
                budget = setting if setting == "min" else int(float(setting) * plain_bytes)
                row = _our_row(base, budget)
        except Exception as error:  # one broken row must not lose the others
            row = replace(base, failure=harness.reason_of(error))
        if setting == PLAIN and row.peak_bytes is not None:
            plain_bytes = row.peak_bytes
        yield row


def _torchs_row(base: CodegenRow, ratio: float, known: dict[Any, CodegenRow]) -> CodegenRow:
    """A partition that an earlier ratio gave is not compiled again."""
    from dataclasses import replace

    from benchmarks.common.fake_cuda import step
    from benchmarks.common.torch_budget import TorchPartition, timed_torch_partitioner
    from compile_remat.compilation.region_run import run_region

    log: list[TorchPartition] = []
    partitioner = timed_torch_partitioner(log, lambda each: (each.saved, each.recomputed) in known)
    try:
        emitted = step.compile_step(_build(base), step.torchs(ratio, {"custom_partitioner_fn": partitioner}))
    except Exception:
        same = known.get((log[-1].saved, log[-1].recomputed)) if log else None
        if same is None:
            raise
        return replace(same, setting=base.setting)
    row = replace(base, peak_bytes=run_region(*emitted).peak_bytes)
    known[log[-1].saved, log[-1].recomputed] = row
    return row


def _our_row(base: CodegenRow, budget: int | str) -> CodegenRow:
    from dataclasses import replace

    import compile_remat
    from benchmarks.common.fake_cuda import step
    from compile_remat.compilation.region_run import run_region
    from compile_remat.errors import BudgetError, find_error

    row = replace(base, budget_bytes=budget if isinstance(budget, int) else None)
    compile_remat.reset_reports()
    try:
        emitted = step.compile_step(_build(base), step.ours(budget))
    except Exception as error:
        refused = find_error(error, BudgetError)
        if refused is None:
            raise
        return replace(row, floor_bytes=refused.floor_bytes)
    (report,) = compile_remat.reports()
    peak_bytes = run_region(*emitted[-2:]).peak_bytes
    return replace(row, predicted_peak_bytes=report.predicted_peak_bytes, peak_bytes=peak_bytes, rounds=report.rounds)


def _build(base: CodegenRow) -> Any:
    import torch

    from benchmarks.models import codegen

    def build() -> tuple[Any, Any]:
        case = codegen.build(base.model, getattr(torch, base.dtype))
        return case.module, case.inputs

    return build


if __name__ == "__main__":
    sys.exit(main())
