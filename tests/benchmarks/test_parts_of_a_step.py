"""What parts of a step take, at toy size: a row for each, none for nothing."""

import argparse

import pytest

from benchmarks import slice_time
from benchmarks.common import harness


def toy(**options: int) -> argparse.Namespace:
    return argparse.Namespace(**vars(harness.parser("toy").parse_args(["--toy"])), **options)


@pytest.mark.full
def test_a_step_whole_and_in_slices_beside_its_wide_product() -> None:
    rows = slice_time.measured(toy(slices=2, rounds=2))
    assert list(rows) == ["step, whole", "step, 2 slices", "product, whole", "product, 2 slices"]
    assert all(len(times) == 2 and min(times) > 0 for times in rows.values())
