"""Benchmarks at toy size find the kernels of the run: a folder of their own is for figures of whole runs."""

from __future__ import annotations

import pytest

from benchmarks import max_speed, promise, slices, step_time, together
from benchmarks.common.compile_caches import without_graph_caches


@pytest.fixture(autouse=True)
def _kernels_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (max_speed, promise, slices, step_time, together):
        monkeypatch.setattr(module, "private_compile_caches", without_graph_caches)
