"""Graphs for a GPU that are read before their code is made: what is read allocates what Triton's code does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda_codegen.conftest import Job

COOPERATIVE = {"triton.cooperative_reductions": True, "triton.force_cooperative_reductions": True}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "gpt", "dtype": "bfloat16"},
    "resnet": {"kind": "resnet", "dtype": "bfloat16"},
    "two loops": {"kind": "normalised_twice"},
    "scan": {"kind": "cumulated"},
    "sort": {"kind": "ordered"},
    "two directions": {"kind": "summed_both_ways"},
    "two directions in bfloat16": {"kind": "summed_both_ways", "dtype": "bfloat16"},
    "cooperative": {"kind": "normalised_twice", "options": COOPERATIVE},
    "several forms": {"kind": "normalised_twice", "options": {"triton.multi_kernel": 1}},
    "one launch": {"kind": "gpt", "dtype": "bfloat16", "options": {"combo_kernels": True}},
    "tuned": {"kind": "summed_both_ways", "options": {"max_autotune": True}},
    "CUDA graphs": {"kind": "gpt", "dtype": "bfloat16", "options": {"triton.cudagraphs": True}},
    "no partitions": {"kind": "gpt", "dtype": "bfloat16", "options": {"graph_partition": False}},
    "one by one": {"kind": "gpt", "dtype": "bfloat16", "options": {"inplace_buffers": False}},
}

EXPECTED = {
    "two loops": "loops",
    "scan": "workspaces",
    "cooperative": "workspaces",
    "two directions": "workspaces",
    "tuned": "workspaces",
    "CUDA graphs": "partitions",
}
"""By case, the feature that its code must have, or else the case tests nothing."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_allocates_what_tritons_code_does(job: Job, case: str) -> None:
    """Reading times no kernel and hands none to a compiler, and the code behind it is the same as without."""
    (found,) = job("tests.cuda_codegen.jobs.light", CASES[case])
    assert found["graphs"] == 2
    if case == "tuned":  # by what it times, Inductor cuts sums into other parts than it does untimed
        assert found["timed"][1] > 0
    else:
        assert found["same"] == [True, True] and found["bytes"][0] == found["bytes"][1] > 0
    assert found["timed"][0] == found["submitted"][0] == 0 < found["submitted"][1]
    assert found["as_without"]
    assert case not in EXPECTED or found[EXPECTED[case]] > 0
