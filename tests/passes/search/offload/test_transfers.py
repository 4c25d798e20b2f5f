"""Copies of a step: by hand, and against a simulation of both engines event by event."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from compile_remat.passes.memory.step_curve import Movable, StepCurve
from compile_remat.passes.search.offload.link import Link
from compile_remat.passes.search.offload.transfers import Transfers, transfers_of

FAST = Link(10**18, 10**18, 10**18)
PER_NS = Link(10**9, 10**9, 10**18)
"""A byte takes a nanosecond."""


def curve_of(sizes: Sequence[int], time_ns: int = 10, last_reads: Sequence[int] | None = None) -> StepCurve:
    """A chain: each place makes a buffer that the next place reads, and the backward reads them from the last to the first."""
    count = len(sizes)
    reads = last_reads or [min(k + 1, count - 1) for k in range(count)]
    forward = np.append(np.cumsum(sizes), sum(sizes))
    backward = np.array([sum(sizes[: count - k]) for k in range(count)])
    starts = time_ns * np.arange(count + 1)
    movable = [Movable(k, f"v{k}", sizes[k], k, reads[k], count - 1 - k) for k in range(count)]
    names = tuple(f"v{k}" for k in range(count))
    return StepCurve(forward, starts, names, backward, starts, tuple(f"g{k}" for k in range(count)), tuple(movable))


def test_an_endless_link_takes_each_buffer_behind_its_last_reader_and_brings_it_back_before_its_first() -> None:
    curve = curve_of([4, 4, 4, 4])
    made = transfers_of(curve, curve.movable[:3], FAST, budget_bytes=100)
    assert made.releases == (2, 3, 4) and made.fetches == (2, 1, 0)
    assert made.nbytes == 12 and made.stall_ns == 0
    assert made.peak_bytes == 8  # a buffer and the one that its kernel reads


def test_kernels_wait_for_the_rest_of_a_copy_only_if_the_budget_or_the_end_asks_for_it() -> None:
    curve = curve_of([25, 4, 4, 4])
    slow = transfers_of(curve, curve.movable[:1], PER_NS, budget_bytes=100)
    assert slow.releases == (4,) and slow.stall_ns == round(PER_NS.slowed_part * 50)  # done after 35 of 40 ns
    tight = transfers_of(curve, curve.movable[:1], PER_NS, budget_bytes=30)
    assert tight.releases == (2,) and tight.stall_ns >= 15  # the third kernel would start after 20 ns
    late = transfers_of(curve, curve.movable[3:], PER_NS, budget_bytes=100)
    assert late.releases == (4,) and late.stall_ns >= 4 + 4  # made last, read first: nothing hides its copies


def test_a_buffer_comes_back_no_earlier_than_there_is_room() -> None:
    curve = curve_of([30, 4, 20, 20])
    wide = transfers_of(curve, curve.movable[:1], PER_NS, budget_bytes=100)
    assert wide.fetches == (0,)  # 30 ns before the last slot
    tight = transfers_of(curve, curve.movable[:1], PER_NS, budget_bytes=60)
    assert tight.fetches == (1,) and tight.stall_ns > wide.stall_ns


@pytest.mark.parametrize("seed", range(200))
def test_against_both_engines_event_by_event(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    sizes = [draw.randint(1, 40) for _ in range(count)]
    reads = [draw.randint(k, count - 1) for k in range(count)]
    curve = curve_of(sizes, draw.randint(1, 30), reads)
    moved = [each for each in curve.movable if draw.random() < 0.6]
    link = Link(10**9 // draw.randint(1, 4), 10**9 // draw.randint(1, 4), 10**18)
    made = transfers_of(curve, moved, link, draw.randint(max(sizes), sum(sizes) + 1))
    forward_ns, backward_ns = _replayed(curve, made, link)
    base_ns = int(curve.forward_starts_ns[-1] + curve.backward_starts_ns[-1])
    slowed_ns = round(link.slowed_part * sum(link.out_ns(each.nbytes) + link.back_ns(each.nbytes) for each in moved))
    assert forward_ns + backward_ns == base_ns + made.stall_ns - slowed_ns
    assert made.peak_bytes == _replayed_peak(curve, made)


def _replayed(curve: StepCurve, made: Transfers, link: Link) -> tuple[int, int]:
    """Times of forward and backward, kernel by kernel, with the releases and fetches at their places."""
    now = free = 0
    ends: dict[int, int] = {}
    for place in range(len(curve.places) + 1):
        for number, each in enumerate(made.moved):
            if each.made == place - 1:  # its kernel has just ended
                free = ends[number] = max(free, now) + link.out_ns(each.nbytes)
        for number in [n for n, at in enumerate(made.releases) if at == place]:
            assert made.moved[number].last_read < place
            now = max(now, ends[number])
        now += int(np.diff(curve.forward_starts_ns, append=curve.forward_starts_ns[-1])[place])
    forward_ns, now, free = now, 0, 0
    queue = sorted(range(len(made.moved)), key=lambda n: (made.moved[n].first_read, n))
    assert [made.fetches[n] for n in queue] == sorted(made.fetches)
    for slot in range(len(curve.slots)):
        for number in [n for n in queue if made.fetches[n] == slot]:
            assert made.fetches[number] <= made.moved[number].first_read
            free = ends[number] = max(free, now) + link.back_ns(made.moved[number].nbytes)
        for number in [n for n in queue if made.moved[n].first_read == slot]:
            now = max(now, ends[number])
        now += int(np.diff(curve.backward_starts_ns)[slot])
    return forward_ns, now


def _replayed_peak(curve: StepCurve, made: Transfers) -> int:
    forward, backward = curve.forward_live.copy(), curve.backward_live.copy()
    for each, release, fetch in zip(made.moved, made.releases, made.fetches, strict=True):
        forward[release:] -= each.nbytes
        backward[:fetch] -= each.nbytes
    return int(max(forward.max(), backward.max()))


def test_host_memory_is_counted_as_the_host_takes_it() -> None:
    exact, rounding = Link(1, 1, 1), Link(1, 1, 1, rounds_up=True)
    sizes = (0, 1, 3, 4096, 4097)
    assert [exact.held_bytes(each) for each in sizes] == list(sizes)
    assert [rounding.held_bytes(each) for each in sizes] == [0, 1, 4, 4096, 8192]
