"""The snapshot for torch's memory viewer: read by torch's own tools, and its live bytes are the plan's."""

import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch.cuda import _memory_viz as viewer

from compile_remat.pages.allocator_snapshot import memory_snapshot
from compile_remat.pages.figures import PageFigures
from tests.pages.examples import MIB, hostile, large, small


def peak_and_end(snapshot: dict[str, Any]) -> tuple[int, int]:
    """The most bytes live at once, and those that are live at the end; no address is used twice at a time."""
    live: dict[int, int] = {}
    peak = 0
    for event in snapshot["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
            peak = max(peak, sum(live.values()))
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
    return peak, sum(live.values())


@pytest.mark.parametrize("figures", [small(), large(100)], ids=["small", "large"])
def test_the_peak_is_that_of_the_plan(figures: PageFigures) -> None:
    step = figures.known_step()
    snapshot = memory_snapshot(figures)
    (segment,) = snapshot["segments"]
    assert peak_and_end(snapshot) == (max(step.live_bytes), segment["active_size"])
    blocks = segment["blocks"]
    assert sum(b["size"] for b in blocks) == segment["total_size"]
    assert all(b["address"] + b["size"] == c["address"] for b, c in pairwise(blocks))


def test_what_a_kernel_takes_for_itself_is_named() -> None:
    sizes = {
        event["frames"][0]["name"]: event["size"]
        for event in memory_snapshot(small())["device_traces"][0]
        if event["action"] == "alloc"
    }
    assert sizes["workspace of b"] == MIB
    assert sizes["a float32[1024, 1024] (saved: saved for the backward)"] == 4 * MIB


@pytest.mark.parametrize("figures", [small(), hostile(), large(100)], ids=["small", "hostile", "large"])
def test_torchs_own_tools_read_it(figures: PageFigures) -> None:
    snapshot = pickle.loads(pickle.dumps(memory_snapshot(figures)))
    text = viewer.trace(snapshot)
    assert "[0:" in text and "MEM[" not in text  # nothing lies outside of the segment
    step = figures.known_step()
    live_bytes = sum(t.nbytes for t in step.tensors if t.end == len(step.columns) - 1)
    assert f"total_allocated: {viewer.Bytes(live_bytes)}" in viewer.segsum(snapshot)
    assert "MemoryViz" in viewer.trace_plot(snapshot)


def test_a_measured_step_stands_beside_the_predicted_one() -> None:
    """As devices of one file; here, what was measured is itself a snapshot of a plan."""
    measured = memory_snapshot(large(100))
    snapshot = pickle.loads(pickle.dumps(memory_snapshot(small(), measured)))
    alone = memory_snapshot(small())
    assert snapshot["device_traces"] == [*measured["device_traces"], *alone["device_traces"]]
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 1]
    text = viewer.trace(snapshot)
    assert "Device 0 ---" in text and "Device 1 ---" in text
    assert "MemoryViz" in viewer.trace_plot(snapshot)


@pytest.mark.parametrize("wrong", [{}, {"segments": []}, [], "step.pickle"])
def test_what_is_no_snapshot_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.cuda\.memory\._snapshot"):
        memory_snapshot(small(), wrong)


def test_without_tensors_there_is_no_snapshot() -> None:
    with pytest.raises(ValueError, match="plan again"):
        memory_snapshot(replace(small(), step=None))
