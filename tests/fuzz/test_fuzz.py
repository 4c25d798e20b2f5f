"""60 random models, 300 with `--full`: the same ones in every run; `make fuzz` runs others."""

from __future__ import annotations

import pytest
from hypothesis import assume

from tests.fuzz import campaign
from tests.fuzz.campaign import run
from tests.fuzz.compiled import Outcome
from tests.fuzz.trial import Trial

CHUNKS = [
    *(("graph", 25, seed) for seed in (0, 1)),
    pytest.param("dynamo", 10, 100, marks=pytest.mark.proof),
    *(pytest.param("graph", 25, seed, marks=pytest.mark.full) for seed in range(2, 10)),
    *(pytest.param("dynamo", 10, seed, marks=pytest.mark.full) for seed in range(101, 105)),
]
"""Entry, examples and seed; small enough for pytest-xdist to spread."""


@pytest.mark.parametrize(("entry", "examples", "seed"), CHUNKS)
def test_random_models_train_right(entry: str, examples: int, seed: int) -> None:
    result = run(entry, "eager", examples, seed)
    assert not result.failures, "\n".join(f"{error}\n{literal}" for error, literal in result.failures.items())
    assert sum(result.ran.values()) == examples


def test_a_program_that_torch_cannot_train_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Trial]()

    def turned_down(trial: Trial) -> list[Outcome]:
        seen.append(trial)
        assume(len(seen) > 2)
        return []

    monkeypatch.setattr(campaign, "check", turned_down)
    assert not run("graph", "eager", examples=3, seed=0).failures
    assert len(seen) > 2
