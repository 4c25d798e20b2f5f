"""Frames of a deep computation."""

from __future__ import annotations

import resource

import pytest

from compile_remat._util.frame_chunk import frames_in_one_chunk

CALLS = 500
DEPTHS = range(400)  # some 120 of these frames are a chunk


def faults_at(depth: int) -> int:
    """Pages that are mapped anew in a loop of calls so many frames deeper than here."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        called()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def called() -> list[object]:
    """A function whose frame is larger than the step from one depth to the next."""
    return [1, [2, [3, [4, [5, [6, [7, [8, [9]]]]]]]]]


def most_faults() -> int:
    return max(map(faults_at, DEPTHS))


def test_no_loop_maps_memory_for_its_calls() -> None:
    if most_faults() < CALLS:
        pytest.skip("this Python maps no memory for calls")
    assert frames_in_one_chunk(most_faults)() < CALLS // 10


def test_it_is_the_function() -> None:
    @frames_in_one_chunk
    def divided(a: int, *, by: int = 2) -> int:
        """Text."""
        return a // by

    assert divided(7) == 3 and divided(7, by=3) == 2
    assert divided.__name__ == "divided" and divided.__doc__ == "Text."
    with pytest.raises(ZeroDivisionError):
        divided(1, by=0)
