"""Phases of a call: each second belongs to one of them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from benchmarks.common.phases import REST, phases_timed


def test_a_phase_inside_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "process_time", lambda: clock.now)

    def spend(seconds: float) -> None:
        clock.now += seconds

    def outer() -> str:
        spend(1)
        place.inner()
        spend(2)
        return "done"

    place = SimpleNamespace(outer=outer, inner=lambda: spend(4))
    with phases_timed({"outer": (place, "outer"), "inner": (place, "inner")}) as spent:
        spend(8)
        assert place.outer() == "done"
        place.inner()
    assert dict(spent) == {REST: 8, "outer": 3, "inner": 8}
    assert place.outer is outer


def test_calls_that_end_with_an_error_count_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "process_time", lambda: clock.now)

    def turn(seconds: float) -> None:
        clock.now += seconds
        place.inner()
        if seconds > 1:
            raise ValueError

    def inner() -> None:
        clock.now += 8

    place = SimpleNamespace(turn=turn, inner=inner)
    functions = {"round": (place, "turn"), "inner": (place, "inner")}
    with phases_timed(functions, raised={"round": "refused"}) as spent:
        place.turn(1)
        with pytest.raises(ValueError):
            place.turn(2)
    assert dict(spent) == {REST: 0, "round": 1, "refused": 2, "inner": 16}
