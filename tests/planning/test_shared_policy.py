"""The first plan of a graph that shares its budget: for two equal halves of a GPT, it is the plan of the known step."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from compile_remat.budget import MemoryBudget
from compile_remat.passes import Planner, PlanOption, plain_option
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.joint_allocation import RegionCall
from compile_remat.planning.request import SharedOption
from compile_remat.planning.shared_policy import _first_option, _first_option_of_fraction, choose_shared
from compile_remat.runtime.shared_budget import SharedBudget
from tests.compilation.test_rounds import GRAPH, MIB

SIZES = (  # KiB at the peak and held, and time in us, of three blocks of `benchmarks.first_step`'s gpt
    (25168, 24656, 0),
    (23120, 22608, 91),
    (20560, 20048, 464),
    (18000, 15440, 1172),
    (16724, 16468, 1325),
    (12368, 11856, 2691),
    (14160, 9296, 3194),
    (9904, 9296, 3666),
    (8336, 7728, 4669),
    (9048, 3672, 5063),
    (9283, 3168, 5319),
    (13375, 1584, 6766),
    (24920, 528, 8190),
)
MENU = [
    PlanOption((str(k),), held << 10, peak << 10, peak << 10, us * 1000) for k, (peak, held, us) in enumerate(SIZES)
]
PLAIN = PlanOption(("plain",), 24656 << 10, 26960 << 10, 26960 << 10, 1_112_000)
STEP_NS = 27_300_000
SAME_PEAK = 0.998


def first_options(budget: MemoryBudget) -> list[PlanOption]:
    """The plans of both halves in the first step."""
    found: list[PlanOption] = []
    for _ in range(2):
        others = [PLAIN] * len(found)
        request = SharedOption(
            sum(option.held_bytes for option in found),
            others_plain_bytes=sum(plain.held_bytes for plain in others),
            more_follow=not found,
        )
        assert request.is_last == bool(found)
        if budget.kind == "fraction":
            effective = EffectiveBudget(budget, plain_bytes=PLAIN.peak_bytes + request.others_plain_bytes)
            best = _first_option_of_fraction(MENU, PLAIN, PLAIN.peak_bytes, effective, request, SAME_PEAK)
        else:
            best = _first_option(MENU, PLAIN.peak_bytes, None, request, SAME_PEAK)
        found.append(best)
    return found


def region(running: PlanOption, step_ns: int) -> Any:
    """As much of a region as a joint allocation reads."""
    plan = SimpleNamespace(saved=running.saved, once_time_ns=step_ns)
    return SimpleNamespace(menu=MENU, plain=PLAIN, excess_bytes={}, running=SimpleNamespace(plan=plan))


def chosen(budget: MemoryBudget, running: Sequence[PlanOption], step_ns: int = STEP_NS) -> list[PlanOption]:
    """The plans that the joint allocation gives to two regions."""
    regions = cast(Any, [region(option, step_ns) for option in running])
    found, _ = SharedBudget(budget, device="of two halves")._choose(regions, [RegionCall(0, 0), RegionCall(1, 0)])
    return [MENU[k] for k in found.chosen]


@pytest.mark.parametrize("given", [0.8, 0.5, 0.3, "min"])
def test_two_halves_keep_their_first_plans(given: object) -> None:
    budget = MemoryBudget.parse(given)
    first = first_options(budget)
    assert chosen(budget, first) == first


def test_a_plan_that_saves_more_than_a_share_of_the_step_takes_over() -> None:
    budget = MemoryBudget.parse(0.5)
    first = first_options(budget)
    assert first == [MENU[5], MENU[5]]  # 5.38 ms more than the fastest; with options 3 and 7 it would be 4.84
    assert chosen(budget, first, STEP_NS // 2) == [MENU[3], MENU[7]]
    assert chosen(budget, [MENU[9], MENU[9]]) == [MENU[3], MENU[7]]


@pytest.mark.parametrize(
    ("given", "request_now", "left_mib"),
    [
        ("1000MiB", SharedOption(), 1000),
        ("1000MiB", SharedOption(others_bytes=200 * MIB), 800),
        ("1000MiB", SharedOption(calls=3), 600),
        ("0.9", SharedOption(), None),
        ("0.9", SharedOption(others_bytes=200 * MIB, others_plain_bytes=600 * MIB), 610),
        ("min", SharedOption(), None),
    ],
    ids=["alone", "beside others", "three calls", "a fraction of what is to come", "a fraction at the end", "min"],
)
def test_the_plan_knows_what_the_others_leave(given: str, request_now: SharedOption, left_mib: int | None) -> None:
    """Three calls: two others hold 200 MiB each while one runs; plain peaks at 300 MiB beside the 600 of the others."""
    plain = plain_option(GRAPH)
    effective = EffectiveBudget(MemoryBudget.parse(given), plain_bytes=plain.peak_bytes)
    found = choose_shared(Planner(GRAPH), request_now, effective, plain)
    assert found.offers
    assert found.left_bytes == (None if left_mib is None else left_mib * MIB), (plain, found)
