"""A process that trains on sequences of varying length, and prints the peak of each step: run by `tests.processes`.

Reads JSON jobs, each with a budget and lengths in order, from its standard input; kernels are stubs.  One line of JSON for each.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
from torch import nn

import compile_remat
from benchmarks.common.code_only import kernels_replaced_by
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.runtime.process_state import clear_process_state

WIDTH = 32


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(self.norm(x))))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Peaks of the steps, what plain torch.compile was known to take at each, and how many plans came from a cache."""
    torch.compiler.reset()
    compile_remat.reset_reports()
    clear_process_state()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    call = torch.compile(model, backend=remat, options={"memory_budget": job["memory_budget"]})
    peaks, plain = [], []
    for length in job["lengths"]:
        x = torch.randn(2, length, WIDTH)
        torch._dynamo.mark_dynamic(x, 1)

        def step(x: torch.Tensor = x) -> None:
            call(x).backward(x)

        model.zero_grad(set_to_none=True)
        gc.collect()
        peaks.append(peak_bytes(step, "cpu").peak_bytes)
        plain.append(largest_plain_bytes("cpu"))
    reports = compile_remat.reports()
    return {
        "peaks": peaks,
        "plain": plain,
        "plans": len(reports),
        "from_cache": sum(report.from_cache for report in reports),
        "messages": [report.message for report in reports],
    }


if __name__ == "__main__":
    with kernels_replaced_by(lambda *args: None):
        for wanted in json.load(sys.stdin):
            print(json.dumps(run(wanted)), flush=True)
