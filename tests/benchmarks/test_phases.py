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
