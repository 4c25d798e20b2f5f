"""Points of a contest on the fake device: emitted peaks of plain, of checkpointed blocks, and of ours at their peak."""

from __future__ import annotations

import pytest

from benchmarks.contest.frontier import Point
from tests.cuda_codegen.conftest import Job


@pytest.mark.full
@pytest.mark.parametrize("model", ["gpt", "resnet50"])
def test_ours_fits_into_the_checkpoints_peak(job: Job, model: str) -> None:
    def point(kind: str, setting: str, memory_budget: int | None = None) -> Point:
        task = {"kind": kind, "setting": setting, "memory_budget": memory_budget}
        options = {"device": "h200", "oom_retry": "0"}
        fields = {"name": model, "task": task, "scale": 0.1, "seed": 0, "share": 1.0, "options": options}
        (found,) = job("benchmarks.common.fake_cuda.contest_process", fields)
        return Point(**found)

    plain, checkpoint = point("plain", "default"), point("checkpoint", "blocks")
    assert plain.failure is None and checkpoint.failure is None
    assert plain.peak_bytes and checkpoint.peak_bytes and checkpoint.peak_bytes < plain.peak_bytes
    ours = point("remat", "at checkpoint blocks", checkpoint.peak_bytes)
    assert ours.failure is None and ours.peak_bytes == ours.predicted_peak_bytes
    assert ours.peak_bytes is not None and ours.peak_bytes <= checkpoint.peak_bytes and ours.extra_ns is not None
    unknown = point("torch", "much")
    assert unknown.failure is not None and "much" in unknown.failure
