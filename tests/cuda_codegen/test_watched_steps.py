"""Triton code of a step with tensors on the host: kernels and copies are in order, and each kind of wait is needed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cuda_codegen.conftest import Job
from tests.races import changes, mutations


@pytest.mark.full
def test_triton_code_has_no_race(job: Job) -> None:
    steps = job("tests.cuda_codegen.jobs.watched_step", 6)
    assert len(steps) == 6 and all(step["races"] == [] and step["triton"] for step in steps)
    moving = [step for step in steps if step["copies"]]
    assert len(moving) >= 3
    known, found = Counter[str](), Counter[str]()
    for step in moving:
        known.update(step["waits"])
        found.update(step["found"])
    assert {changes.WAITS[kind] for kind in set(known) - set(found)} <= set(mutations.HARMLESS)
    assert len(found) == 4
