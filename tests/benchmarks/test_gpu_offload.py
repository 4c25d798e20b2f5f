"""The parts of `benchmarks.gpu_offload` that run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_offload
from compile_remat._torch.offload.streams import Direction


@pytest.mark.full
@pytest.mark.usefixtures("own_caches")
def test_gradients_in_bfloat16_are_equal_while_each_stream_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setattr(gpu_offload.inductor_config, "emulate_precision_casts", False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    flags = ["--device", "cpu", "--toy", "--steps", "2", "--model", "gpt", "--out", str(tmp_path)]
    assert gpu_offload.main(flags) == 0
    lines = json.loads((tmp_path / "offload.json").read_text())["lines"]
    compared = [line for line in lines if "differ" in line]
    assert len(compared) == 4 and all(line["steps"] == 2 and not line["differ"] for line in compared)
    assert "tensors on the host" in compared[0]["text"] and "copies" in lines[-1]["text"]


@pytest.mark.parametrize("slow", [None, *Direction])
def test_one_stream_idles_and_copies_arrive(slow: Direction | None, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[bool]()
    monkeypatch.setattr(gpu_offload, "_sleep", lambda: slept.append(True))
    device, given = torch.device("cpu"), torch.arange(8.0)
    streams = gpu_offload.Spinning(device, slow)
    host, back = streams.empty_host(given), torch.empty_like(given)
    ready = streams.current(device).record()
    out = streams.engine(device, Direction.OUT).copy(host, given, [ready])
    streams.engine(device, Direction.BACK).copy(back, host, [out]).synchronize()
    assert torch.equal(back, given) and len(slept) == 1
