"""Chooses the plan option of a region that shares its budget with other calls in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import format_bytes, in_one_unit
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError, SharedBudgetError, warn
from compile_remat.passes import (
    Planner,
    PlanOption,
    plain_option,
    plan_options,
)
from compile_remat.planning.budget_source import EffectiveBudget, allowed_text, bytes_of, checkpoints_text
from compile_remat.planning.joint_allocation import Allocation, RegionCall, allocate, step_peak_bytes
from compile_remat.planning.plan_policy import keyed, lapsed_text, planners
from compile_remat.planning.request import ChosenPlan, SharedOption
from compile_remat.report import joined

EXPECTED_REGIONS = 4
"""Regions that a step is assumed to have while their number is unknown: a region's saved bytes count beside those of three
others.  For four graphs of two blocks each, 2.0 MiB in the first step; with the lowest plan of each graph 3.8 (plain 4.0)."""


def choose_shared(planner: Planner, request: SharedOption, effective: EffectiveBudget, plain: PlanOption) -> ChosenPlan:
    """Returns a plan for a region that shares a budget with others, with the menu of all its options.

    Args:
        plain: Plain torch.compile's plan option for the region.

    Raises:
        BudgetError: No option fits, even though no other region holds bytes.
        SharedBudgetError: No option fits beside the bytes that the other regions hold, or for all calls of the region.
    """
    calls = [RegionCall(0, request.gradient_bytes)] * max(1, request.calls)
    is_fraction = effective.budget.kind == "fraction"
    if is_fraction:
        step_bytes = request.others_plain_bytes + step_peak_bytes(calls, [plain])
        effective = replace(effective, plain_bytes=max(effective.plain_bytes, step_bytes))
    limit_bytes = bytes_of(effective)
    known_bytes = None if is_fraction and request.is_open else limit_bytes  # a fraction grows with the graphs to come
    most_bytes = 0 if request.calls else _most_bytes(planner, plain)
    found: list[tuple[int, ChosenPlan]] = []
    for planned, lapsed in planners(planner):
        menu = plan_options(planned)
        left_bytes = None if limit_bytes is None else limit_bytes - request.others_bytes
        if request.calls:
            best = menu[allocate(calls, [menu], None if is_fraction else left_bytes).chosen[0]]
        elif is_fraction:
            best = _first_option_of_fraction(menu, plain, most_bytes, effective, request, planner.options.same_peak)
        else:
            best = _first_option(menu, most_bytes, left_bytes, request, planner.options.same_peak)
        plan = keyed(planned.plan_of(planned.mask_of(best.saved), None), planner)
        peak_bytes = request.others_bytes + step_peak_bytes(calls, [best])
        own_limit_bytes = _left_bytes(known_bytes, peak_bytes, plan.peak_bytes)
        found.append((peak_bytes, ChosenPlan(plan, None, lapsed_text(lapsed), menu, own_limit_bytes)))
        if limit_bytes is None or peak_bytes <= limit_bytes:
            return found[-1][1]
    peak_bytes, choice = min(found, key=lambda f: f[0])
    assert limit_bytes is not None
    if is_fraction and not request.calls and request.is_open:
        return choice  # the bytes of the fraction are known only with the graphs to come
    if not effective.source and not request.may_miss:
        largest, written = choice.plan.largest, effective.budget.written
        if not request.calls and not request.others_bytes:
            raise BudgetError(limit_bytes, peak_bytes, largest, written)  # the graph needs too much by itself
        raise SharedBudgetError(limit_bytes, peak_bytes, largest, request.others_bytes, len(calls), written)
    allowed = allowed_text(replace(effective, source=effective.source or "memory_budget"), limit_bytes)
    text = f"{allowed}, and the graphs of this step need {format_bytes(peak_bytes)}"
    if request.may_miss:
        text += " this once: the first of them were planned as if no other followed; the next step's plans are chosen together"
    text = joined(text, checkpoints_text(effective, planner.problem))
    warn(text)
    return replace(choice, message=joined(choice.message, text))


def _left_bytes(limit_bytes: int | None, step_bytes: int, own_bytes: int) -> int | None:
    """Returns what a step leaves to a graph of `own_bytes`; None without a limit, and for a step that exceeds it."""
    if limit_bytes is None or step_bytes > limit_bytes:
        return None
    return limit_bytes - (step_bytes - own_bytes)


def excess_text(
    found: Allocation,
    limit_bytes: int | None,
    *,
    num_runs: int,
    source: str,
    budget: MemoryBudget,
    largest: Sequence[LiveBuffer] = (),
) -> str:
    """Returns a sentence about a step whose lowest plans exceed a budget that may be exceeded; empty if the step keeps it.

    Args:
        found: Plans of the step.
        source: Origin of a budget that may be exceeded; empty if exceeding it is an error.
        budget: The budget as the user gave it.

    Raises:
        SharedBudgetError: The step exceeds a budget that must hold.
    """
    if limit_bytes is None or found.peak_bytes <= limit_bytes:
        return ""
    if not source:
        raise SharedBudgetError(
            limit_bytes, found.peak_bytes, tuple(largest), num_runs=num_runs, written=budget.written
        )
    allowed, needed = in_one_unit(limit_bytes, found.peak_bytes)
    origin = f" (set by {budget.origin})" if budget.origin else ""
    return (
        f"{source} allows {allowed}{origin}, and {num_runs} runs of compiled graphs need {needed} in a step at least: "
        "each graph runs with its lowest plan"
    )


def _most_bytes(planner: Planner, plain: PlanOption) -> int:
    """Returns the limit of the own peak of a region's first plan: the higher of plain's peaks in its own and our kernel order."""
    return max(_own_peak_bytes(plain), _own_peak_bytes(plain_option(planner.problem)))


def _first_option(
    menu: Sequence[PlanOption], most_bytes: int, left_bytes: int | None, request: SharedOption, same_peak: float
) -> PlanOption:
    """Returns the option for a region's first step, whose other regions are unknown, under a budget in bytes or without a limit.

    Candidates are the options whose own peak is at most `left_bytes` and plain's peak (`most_bytes`); if there are none, those with
    nearly the lowest own peak.  Under a budget in bytes, the option is chosen whose step would have the lowest peak if
    `EXPECTED_REGIONS` such regions ran in it.  Without a limit, it is the option whose peaks over steps of 1, 2, ... such regions
    are closest to the lowest ones; after the last graph break, where no region follows, the option of the lowest peak.
    """
    lowest_bytes = min(map(_own_peak_bytes, menu))
    limit_bytes = int(most_bytes / same_peak)
    if left_bytes is not None:
        limit_bytes = min(limit_bytes, left_bytes)
    if lowest_bytes > limit_bytes:
        limit_bytes = int(lowest_bytes / same_peak)
    fitting = [option for option in menu if _own_peak_bytes(option) <= limit_bytes]
    if left_bytes is not None:
        return min(fitting, key=_expected_bytes)
    following = range(1 if request.is_last else EXPECTED_REGIONS)
    least = [min(_expected_bytes(option, n) for option in fitting) or 1 for n in following]
    return min(fitting, key=lambda option: sum(_expected_bytes(option, n) / least[n] for n in following))


def _first_option_of_fraction(
    menu: Sequence[PlanOption],
    plain: PlanOption,
    most_bytes: int,
    effective: EffectiveBudget,
    request: SharedOption,
    same_peak: float,
) -> PlanOption:
    """Returns the option for a region's first step under a fraction, whose bytes grow with plain's peak for the regions to come.

    The options are compared over steps in which 0, 1, ... more such regions follow.  The fastest option is chosen that exceeds the
    fraction in no such step and holds at most the fraction of the bytes that plain would hold: if every region keeps its share, the
    step keeps its budget, and the plan may stay once the step is known.  If there is none, the option is chosen whose excesses,
    relative to the limits, have the lowest sum.  Candidates are the options whose own peak is no higher than plain's.
    """
    limit_bytes = max(most_bytes, min(map(_own_peak_bytes, menu))) / same_peak
    following = range(EXPECTED_REGIONS if request.is_open else 1)
    plain_bytes = [request.others_plain_bytes + n * plain.held_bytes + _own_peak_bytes(plain) for n in following]
    limits = [
        bytes_of(replace(effective, plain_bytes=max(effective.plain_bytes, nbytes))) or 1 for nbytes in plain_bytes
    ]

    def exceeds(option: PlanOption) -> float:
        own_bytes = request.others_bytes + _own_peak_bytes(option)
        return sum(max(0.0, (own_bytes + n * option.held_bytes) / limits[n] - 1) for n in following)

    fitting = [option for option in menu if _own_peak_bytes(option) <= limit_bytes]
    held_plain_bytes = request.others_plain_bytes + plain.held_bytes
    held_bytes = (bytes_of(replace(effective, plain_bytes=held_plain_bytes)) or 0) - request.others_bytes
    keeping = [option for option in fitting if option.held_bytes <= held_bytes and not exceeds(option)]
    if keeping:
        return min(keeping, key=lambda option: option.time_ns)
    return min(fitting, key=lambda option: (exceeds(option), _expected_bytes(option)))


def _expected_bytes(option: PlanOption, following: int = EXPECTED_REGIONS - 1) -> int:
    """Returns the peak of a step in which `following` more such regions run."""
    return following * option.held_bytes + _own_peak_bytes(option)


def _own_peak_bytes(option: PlanOption) -> int:
    """Returns the region's peak beside others: gradients of its outputs come in while the outputs that its backward reads live."""
    return option.peak_bytes + option.kept_output_bytes
