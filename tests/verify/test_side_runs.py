"""Side runs need memory, and are given up where there is too little."""

from typing import Any

import pytest
import torch

from compile_remat.device import free_memory
from compile_remat.verify import side_runs
from compile_remat.verify.no_recompute import NoRecomputePartitioner
from compile_remat.verify.observation import NotComparable
from compile_remat.verify.side_runs import SideRuns, require_memory


def test_a_device_without_memory_for_a_side_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: 2000)
    monkeypatch.setattr(side_runs, "host_free_bytes", lambda: 2000)
    device = torch.device("cuda", 0)
    require_memory(2000, 2000, [device])
    require_memory(1000, 1000, [])
    with pytest.raises(NotComparable, match=r"not enough device memory: it takes 2\.0 KiB, and 2\.0 KiB is free"):
        require_memory(2001, 0, [device])
    for needed_bytes, results_bytes, devices in ((0, 2001, [device]), (1000, 1001, [])):
        with pytest.raises(NotComparable, match="not enough host memory"):
            require_memory(needed_bytes, results_bytes, devices)


def test_a_side_run_that_runs_out_of_memory_is_skipped() -> None:
    def out_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    x, facts = torch.randn(8), NoRecomputePartitioner()
    for runs in (SideRuns(torch.sin, out_of_memory, facts, 0), SideRuns(out_of_memory, torch.sin, facts, 0)):
        with pytest.raises(NotComparable, match=r"not enough device memory .*planted"), runs.isolated([x]):
            runs.expected()
            runs.actual()
