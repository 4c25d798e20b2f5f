"""The fake device itself: what would be wrong without an error, and that its code is Triton's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_codegen.conftest import Job

EMIT = "tests.cuda_codegen.jobs.emit"


@pytest.mark.parametrize(
    ("broken", "text"), [("device", "accept"), ("triton", "no Triton"), ("convolution", "not by cuDNN")]
)
def test_convolutions_are_those_of_cudnn_and_what_is_not_installed_is_seen(broken: str, text: str, job: Job) -> None:
    """Without the fake cuDNN, convolutions are `Slow2d` and give another layout."""
    (found,) = job("tests.cuda_codegen.jobs.canaries", broken)
    assert found.pop("problem") == "" and text in found.pop("broken")
    assert found.pop("contiguous stays") and len(found) == 4
    for backend, is_channels_last, device in found.values():
        assert backend in ("Cudnn", "CudaDepthwise2d") and device == "cuda:0"
        assert is_channels_last or backend == "CudaDepthwise2d"


def test_kernels_are_tritons_and_become_cubins(job: Job) -> None:
    """A dry run leaves the process's device alone."""
    (found,) = job(EMIT, {"budget": "min", "compiled": True})
    assert found["graphs"] == 2 and found["triton_kernels"] > 15
    assert found["cuda_buffers"] > 30 and found["cpu_buffers"] == 0
    assert found["cubins"] >= found["triton_kernels"] // 2  # equal kernels are one
    assert found["scheduled"] == pytest.approx(found["predicted"], rel=0.01)
    assert found["set_device"] == 0


def test_no_kernel_is_compiled_before_its_plan_is_kept(job: Job) -> None:
    """No kernel is handed to a compile process either, as Inductor does while it writes code."""
    (found,) = job("tests.cuda_codegen.jobs.refused", TORCHINDUCTOR_COMPILE_THREADS="2")
    assert found["rounds"][:2] == [0, 0]
    assert found["asked"] == found["in the code"] > 15


@pytest.mark.parametrize(
    ("options", "counted"),
    [({"triton.cudagraphs": True}, "partitions"), ({"triton.multi_kernel": 1}, "multi_kernels")],
    ids=["reduce-overhead", "multi_kernel"],
)
def test_the_dry_run_follows_what_options_change(job: Job, options: dict[str, Any], counted: str) -> None:
    (found,) = job(EMIT, {"budget": "min", "options": options})
    assert found[counted] >= 2
    assert found["scheduled"] == pytest.approx(found["predicted"], rel=0.01)


def test_the_fusion_guard_keeps_the_peak_down(job: Job) -> None:
    jobs = [{"budget": "min", "dropout": True, "unguarded": unguarded} for unguarded in (False, True)]
    peaks = [job(EMIT, each)[0]["scheduled"] for each in jobs]
    assert peaks[0] < peaks[1]
