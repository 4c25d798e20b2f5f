"""60 random models, 300 with `--full`: the same ones in every run; `make fuzz` runs others."""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import run

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
