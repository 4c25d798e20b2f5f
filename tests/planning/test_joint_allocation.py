"""Sharing a budget out: against every choice there is."""

from __future__ import annotations

import itertools
import random

import pytest

from compile_remat.passes import PlanOption
from compile_remat.planning.joint_allocation import RegionCall, allocate, step_peak_bytes


def option(held: int, peak: int, time: int, kept: int = 0) -> PlanOption:
    return PlanOption((f"{held}-{peak}-{time}",), held, peak, peak, time, kept)


def slow_peak(calls: list[RegionCall], plans: list[PlanOption]) -> int:
    """The step, event by event."""
    live = peak = 0
    for call in calls:
        plan = plans[call.graph]
        peak = max(peak, live + plan.forward_peak_bytes)
        live += plan.held_bytes
    comes_in = False
    for call in reversed(calls):
        plan = plans[call.graph]
        live -= plan.held_bytes
        peak = max(peak, live + plan.peak_bytes + plan.kept_output_bytes * comes_in)
        live += call.gradient_bytes
        comes_in = True
    return peak


def random_case(seed: int) -> tuple[list[RegionCall], list[list[PlanOption]]]:
    draw = random.Random(seed)
    graphs = draw.randint(1, 3)
    menus = []
    for _ in range(graphs):
        own = []
        for _ in range(draw.randint(1, 4)):
            held = draw.randint(1, 60)
            own.append(option(held, held + draw.randint(0, 60), draw.randint(0, 50), draw.randint(0, 9)))
        menus.append(own)
    calls = [RegionCall(draw.randrange(graphs), draw.randint(0, 9)) for _ in range(draw.randint(1, 6))]
    return calls, menus


@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_choice_within_the_budget(seed: int) -> None:
    calls, menus = random_case(seed)
    everything = []
    for choice in itertools.product(*(range(len(own)) for own in menus)):
        plans = [own[k] for own, k in zip(menus, choice, strict=True)]
        time = sum(plans[call.graph].time_ns for call in calls)
        everything.append((slow_peak(calls, plans), time, choice))
        assert step_peak_bytes(calls, plans) == slow_peak(calls, plans)
    lowest = min(peak for peak, _, _ in everything)
    highest = max(peak for peak, _, _ in everything)
    for budget in (None, lowest - 1, lowest, (lowest + highest) // 2, highest):
        found = allocate(calls, menus, budget)
        limit = lowest if budget is None else max(budget, lowest)
        assert found.peak_bytes <= limit
        assert found.time_ns == min(time for peak, time, _ in everything if peak <= limit)
        plans = [own[k] for own, k in zip(menus, found.chosen, strict=True)]
        assert (found.peak_bytes, len(found.chosen)) == (slow_peak(calls, plans), len(menus))


def test_bytes_of_real_sizes_are_met_exactly() -> None:
    gib = 1 << 30
    own = [option(k * gib // 7 + 1, 5 * gib + k, 100 - k) for k in range(20)]
    calls = [RegionCall(0, gib // 3)] * 40
    for k in range(20):
        exact = step_peak_bytes(calls, [own[k]])
        assert allocate(calls, [own], exact).peak_bytes <= exact
        assert allocate(calls, [own], exact + exact // 10**6).time_ns <= 40 * own[k].time_ns


def test_a_choice_that_rounding_hides_is_found() -> None:
    """Two options that differ by 512 bytes in a step of gigabytes (blocks of a ResNet-50): below its aim HiGHS finds nothing."""
    menus = [
        [option(51380224, 1078985728, 653149)],
        [option(205526016, 1130478592, 860193)],
        [option(387451328, 899262464, 644325), option(387450816, 899262464, 644327)],
        [option(102761472, 1079558144, 945150)],
        [option(102760448, 616867840, 583254, 102760448)],
        [option(51380224, 309481472, 502179, 51380224)],
        [option(25690112, 278708224, 787430, 25690112)],
        [option(25706496, 141705216, 449896, 25690112)],
        [option(4, 30312404, 40036)],
    ]
    graphs = [0, 1, 2, 2, 3, 4, 4, 4, 5, 5, 5, 5, 5, 6, 7, 7, 8]
    calls = [RegionCall(g, {0: 19072, 8: 4098000}.get(g, 0)) for g in graphs]
    found = allocate(calls, menus, None)
    assert found.peak_bytes == step_peak_bytes(calls, [menus[g][k] for g, k in enumerate(found.chosen)])
    assert found.peak_bytes <= step_peak_bytes(calls, [menu[0] for menu in menus])


def test_a_long_step_is_looked_at_in_places() -> None:
    own = [option(1, 100, 9), option(3, 100, 1)]
    calls = [RegionCall(0, 0)] * 1000
    assert allocate(calls, [own], 1000 + 100).chosen == (0,)
    assert allocate(calls, [own], 3 * 1000 + 100).chosen == (1,)
