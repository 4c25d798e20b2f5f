"""Same graph, same settings: the same plan, byte for byte, whatever the hash seed, the threads and the rank.

Only what convolutions and attention take for themselves on a CPU depends on the number of threads, and a plan on that.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import finish, start

PROCESSES = {
    "seed 0, one thread": {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
    "seed 1, rank 0 of 2": {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2", "RANK": "0", "WORLD_SIZE": "2"},
    "seed 2, rank 1 of 2": {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "RANK": "1", "WORLD_SIZE": "2"},
}

ALL_JOBS = {
    f"{model} at {budget} on {device}": {
        "model": model,
        "batch": 8,
        "compare": False,
        "compile": {"options": {"memory_budget": budget, "device": device, "compiler": "eager"}},
    }
    for model in ("transformer", "branches")
    for budget, device in (("max", "cpu"), (0.6, "h200"), ("min", "cpu"))
}
PROOF = "transformer at 0.6 on h200"
NAMES = [pytest.param(name, marks=pytest.mark.proof if name == PROOF else pytest.mark.full) for name in ALL_JOBS]


@pytest.fixture(scope="module")
def plans(is_full: bool) -> dict[str, dict[str, Any]]:
    """For each process, the plan of each job."""
    jobs = ALL_JOBS if is_full else {PROOF: ALL_JOBS[PROOF]}
    first, second, third = PROCESSES
    running = {name: start(PROCESSES[name]) for name in ((first, second, third) if is_full else (first, third))}
    seen = {name: finish(process, list(jobs.values())) for name, process in running.items()}
    return {
        name: {job: found["reports"][0]["plan"] for job, found in zip(jobs, all_found, strict=True)}
        for name, all_found in seen.items()
    }


@pytest.mark.parametrize("job", NAMES)
def test_every_process_makes_the_same_plan(job: str, plans: dict[str, dict[str, Any]]) -> None:
    if job.endswith("cpu") and job != "transformer at max on cpu":  # there, no attention runs at the peak
        plans = {name: found for name, found in plans.items() if "one thread" not in name}
        assert len(plans) == 2
    assert len({json.dumps(found[job]) for found in plans.values()}) == 1


@pytest.mark.proof
def test_the_plans_are_worth_comparing(plans: dict[str, dict[str, Any]]) -> None:
    """The plans recompute values, and differ between settings."""
    found = next(iter(plans.values()))
    assert len({json.dumps(plan) for plan in found.values()}) == len(found)
    assert all(plan["recomputed"] for job, plan in found.items() if " max " not in job)
