"""The plan of a graph that is taken, and the plan that is tried next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat.budget import MemoryBudget
from compile_remat.compilation import rounds as module
from compile_remat.compilation.readings import PlanRefused
from compile_remat.compilation.region_run import RegionRun
from compile_remat.compilation.rounds import FACTUAL, LOWERED_FOR_LOWEST, TIGHTENED, Rounds
from compile_remat.cost_models import load_device
from compile_remat.errors import BudgetError, SharedBudgetError, TagConflictError
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import GraphFacts, KernelFacts, Plan, PlanOption, Status
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.passes.problem.facts import NOTHING_ASSUMED
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, POINTWISE, Problem, Step, Value
from compile_remat.planning.request import LOWEST, Fit, FitBelow, Replay, Request, SharedOption
from compile_remat.planning.settings import Settings
from compile_remat.report import Report

MIB = 1 << 20
BYTES, MIN = MemoryBudget("bytes", 1000 * MIB), MemoryBudget("min")
GRAPH = Problem(
    values=(
        Value("mm", 100 * MIB, EXTERN, (), 9),
        Value("sin", 100 * MIB, POINTWISE, (0,), 2, position=1),
        Value("mm_1", 100 * MIB, EXTERN, (1,), 9, position=2),
    ),
    steps=(
        Step("mul", 100 * MIB, POINTWISE, (1,), (), 2),
        Step("mm_2", 100 * MIB, EXTERN, (0,), (0,), 9, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    ),
)
"""The tests set the peaks of its plans; the assumptions about its nodes are computed."""


def rounds_for(
    budget: MemoryBudget, request: Request | None = None, *, is_settled: bool = False, **settings: Any
) -> Rounds:
    partitioner = RematPartitioner(Settings(budget, load_device("cpu"), **settings), request or Fit(), guarded=True)
    return Rounds(partitioner, is_settled=is_settled)


def planned(rounds: Rounds, peak_mib: int, floor_mib: int | None = None, status: Status = Status.FEASIBLE) -> Report:
    """The report of the next plan, before it is lowered."""
    budget = rounds.partitioner.settings.budget
    budget_bytes = (
        int(budget.value or 0) if budget.kind == "bytes" else 1000 * MIB if budget.kind == "fraction" else None
    )
    largest = (LiveBuffer("mm", 100 * MIB, (), "float32", "", "", "saved"),)
    plan = Plan("key", status, budget_bytes, ("mm",), (), peak_mib * MIB, 0, 0, 0, 0, 0, 0, largest)
    plan = replace(plan, pictures=PlanPictures(GRAPH.with_facts(rounds.partitioner.assumed)))
    floor_bytes = None if floor_mib is None else floor_mib * MIB
    return Report("key", budget.written, budget_bytes, plan, floor_bytes)


FORWARD, BACKWARD = ("mm", "sin", "mm_1"), ("mul", "mm_2")


def run_of(peak_mib: int, at: str = "mm_2", *, is_read: bool = True, **stored: bool) -> RegionRun:
    """Returns a dry run of a plan's graphs.

    Args:
        at: The node whose kernel needs all these bytes; if empty, no kernel in the facts does.
        is_read: True if the run has facts of its graphs.
        stored: By the name of a node of the backward, True if the node is written to memory.
    """
    live_bytes = {at: peak_mib * MIB}
    forward = GraphFacts(tuple(KernelFacts((name,), live_bytes.get(name, 1)) for name in FORWARD), {"sin": 1})
    written = {name for name, is_stored in ({"sin": False, "mul": True} | stored).items() if is_stored}
    kernels = tuple(KernelFacts((name,), live_bytes.get(name, 1)) for name in ("sin", *BACKWARD))
    backward = GraphFacts(kernels, dict.fromkeys(written, 1))
    return RegionRun(peak_mib * MIB, (), forward=forward if is_read else None, backward=backward if is_read else None)


def is_taken(rounds: Rounds, report: Report, run: RegionRun) -> bool:
    """Returns whether `rounds` accepts the plan of `report`, given the dry run of its lowered graphs."""
    try:
        rounds.judge([report], run)
        rounds.judge_code([replace(report, scheduled_peak_bytes=run.peak_bytes)])
    except PlanRefused:
        return False
    return True


@pytest.fixture
def promise(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the peak, in MiB, of the lowest plan that the planner knows of with all that was seen."""

    def set_to(peak_mib: int) -> None:
        lowest = SimpleNamespace(peak_bytes=peak_mib * MIB, saved=("nobody has seen it",), again=(), written=())
        monkeypatch.setattr(module.Searches, "planner", lambda *_: SimpleNamespace(lowest=lambda: lowest))

    set_to(1)
    return set_to


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_a_plan_that_keeps_its_bytes_is_taken_at_once() -> None:
    rounds = rounds_for(BYTES)
    first, report = rounds.partitioner, planned(rounds, 990, 300)
    assert is_taken(rounds, report, run_of(1000))  # more than it was planned for, and inside
    assert rounds.partitioner == first
    concluded = rounds.concluded(report)
    assert (concluded.observed_peak_bytes, concluded.rounds) == (1000 * MIB, 1)
    assert concluded.predicted_peak_bytes == 1000 * MIB
    assert concluded.floor_bytes == 300 * MIB


def test_one_that_is_too_large_is_planned_again_on_facts_then_for_fewer_bytes_then_taken() -> None:
    rounds, requests, assumed = rounds_for(BYTES), list[Request](), []
    for number in range(FACTUAL + TIGHTENED):
        requests.append(rounds.partitioner.request)
        assumed.append(rounds.partitioner.assumed)
        taken = is_taken(rounds, planned(rounds, 990 - number, 300), run_of(1150 + number))
        assert taken == (number == FACTUAL + TIGHTENED - 1)
    assert requests[:FACTUAL] == [Fit()] * FACTUAL
    # Each time less than the last plan by what its code was too large by.
    assert requests[FACTUAL:] == [FitBelow((988 - 152) * MIB), FitBelow((836 - 153) * MIB)]
    assert assumed[0] == NOTHING_ASSUMED and len(set(assumed)) == len(assumed), "each plan knows more than the last"
    concluded = rounds.concluded(planned(rounds, 986))
    assert (concluded.observed_peak_bytes, concluded.rounds) == (1154 * MIB, FACTUAL + TIGHTENED)


def test_the_second_plan_is_taken_where_it_fits() -> None:
    rounds = rounds_for(BYTES)
    assert not is_taken(rounds, planned(rounds, 1000, 300), run_of(1200))
    second = rounds.partitioner
    assert second.request == Fit() and dict(second.assumed.backward_bytes).keys() == {"mm_2"}
    report = planned(rounds, 999, 300)
    assert is_taken(rounds, report, run_of(999))
    assert rounds.partitioner == second and rounds.concluded(report).rounds == 2


@pytest.mark.parametrize("run", [run_of(1200, is_read=False), run_of(1200, at="")], ids=["unread", "no news"])
def test_where_the_graphs_say_nothing_new_the_next_plan_is_for_fewer_bytes(run: RegionRun) -> None:
    """As without observation: the peak of the emitted code is compared with the budget."""
    rounds = rounds_for(BYTES)
    assert not is_taken(rounds, planned(rounds, 990, 300), run)
    assert rounds.partitioner.request == FitBelow(790 * MIB)


def test_code_whose_graphs_were_not_read_is_judged_alone() -> None:
    """Such graphs come from a cache: the emitted code is judged, for as many rounds as are allowed."""
    rounds, requests = rounds_for(BYTES), list[Request]()
    for _ in range(TIGHTENED + 1):
        requests.append(rounds.partitioner.request)
        report = replace(planned(rounds, 990, 300), scheduled_peak_bytes=1100 * MIB)
        if len(requests) <= TIGHTENED:
            with pytest.raises(PlanRefused):
                rounds.judge_code([report])
        else:
            rounds.judge_code([report])
    assert requests == [Fit(), FitBelow(890 * MIB), FitBelow(790 * MIB)]
    assert rounds.concluded(report) == report, "nothing was observed"


def test_the_code_has_the_last_word_where_it_needs_more_than_was_observed(caplog: pytest.LogCaptureFixture) -> None:
    """Such a difference is a defect and is logged as one; the budget holds nevertheless."""
    rounds = rounds_for(BYTES)
    report = planned(rounds, 990, 300)
    rounds.judge([report], run_of(999))
    first = rounds.partitioner
    with caplog.at_level("WARNING", logger="compile_remat"):
        rounds.judge_code([replace(report, scheduled_peak_bytes=int(999.9 * MIB))])
        assert not caplog.records and rounds.partitioner == first, "a tenth of a percent is the same"
        with pytest.raises(PlanRefused):
            rounds.judge_code([replace(report, scheduled_peak_bytes=1100 * MIB)])
    assert rounds.partitioner.request == FitBelow(890 * MIB)
    assert "its code needs" in caplog.text


@pytest.mark.parametrize("status", [Status.REPLAYED, Status.FALLBACK])
@pytest.mark.parametrize("budget", [BYTES, MIN])
def test_a_pinned_plan_and_a_fallback_are_taken(budget: MemoryBudget, status: Status) -> None:
    rounds = rounds_for(budget)
    first, report = rounds.partitioner, planned(rounds, 990, 300, status)
    assert is_taken(rounds, report, run_of(1500))
    assert rounds.partitioner == first and rounds.concluded(report).observed_peak_bytes == 1500 * MIB


@pytest.mark.parametrize("budget", [BYTES, MIN])
def test_what_an_earlier_process_found_is_taken(budget: MemoryBudget) -> None:
    rounds = rounds_for(budget, is_settled=True)
    first = rounds.partitioner
    assert is_taken(rounds, planned(rounds, 990, 300), run_of(1500))
    assert is_taken(rounds, planned(rounds, 2000, 300), run_of(2500))
    assert rounds.partitioner == first


def test_graphs_of_several_plans_are_taken() -> None:
    """Nested regions: the budget of one plan is not what both come to."""
    rounds = rounds_for(BYTES)
    report = planned(rounds, 990, 300)
    rounds.judge([report, report], run_of(1500))
    rounds.judge_code([report, report])
    assert not rounds.seen and rounds.concluded(report) == report


def test_a_plan_beside_other_graphs_is_planned_again_on_facts_and_keeps_its_menu() -> None:
    """The limit is what the other graphs leave of the budget; a plan for fewer bytes would have no menu for the next step."""
    rounds = rounds_for(BYTES, SharedOption(others_bytes=500 * MIB))

    def report(left_mib: int) -> Report:
        found = planned(rounds, 450)
        offers = (PlanOption(("mm",), 100 * MIB, 450 * MIB, 450 * MIB, 0),)
        assert found.plan is not None
        alone = replace(found.plan, budget_bytes=None)
        return replace(found, plan=alone, budget_bytes=None, offers=offers, left_bytes=left_mib * MIB)

    first = rounds.partitioner
    assert not is_taken(rounds, report(500), run_of(510))
    assert rounds.partitioner.request == first.request and rounds.partitioner.assumed != first.assumed
    second = rounds.partitioner
    assert is_taken(rounds, report(500), run_of(510)), "its graphs say nothing new"
    assert rounds.partitioner == second and rounds.concluded(report(500)).rounds == 2
    roomy = rounds_for(BYTES, first.request)
    assert is_taken(roomy, report(510), run_of(510))


# -- the lowest -------------------------------------------------------------------------------------------------------

Promise = Callable[[int], None]


@pytest.mark.parametrize("at", ["", "mm_2"], ids=["no news", "news"])
def test_a_lowest_plan_that_is_as_low_as_planned_is_taken(at: str, promise: Promise) -> None:
    """Code within half a percent of the plan is accepted; its excess says nothing of other plans."""
    rounds = rounds_for(MIN)
    first, report = rounds.partitioner, planned(rounds, 500, 500)
    assert is_taken(rounds, report, run_of(502, at))
    assert rounds.partitioner == first, "what another plan would assume is not in the key of this one"
    concluded = rounds.concluded(report)
    assert (concluded.observed_peak_bytes, concluded.floor_bytes, concluded.rounds) == (502 * MIB, 502 * MIB, 1)


def test_one_that_is_higher_is_planned_again_where_a_lower_one_is_in_sight(promise: Promise) -> None:
    rounds = rounds_for(MIN)
    promise(550)
    assert not is_taken(rounds, planned(rounds, 500, 500), run_of(600))
    second = rounds.partitioner
    assert second.request == Fit() and dict(second.assumed.backward_bytes).keys() == {"mm_2"}
    report = planned(rounds, 550, 550)
    assert is_taken(rounds, report, run_of(551))
    assert rounds.partitioner == second and rounds.concluded(report).floor_bytes == 551 * MIB


@pytest.mark.parametrize(("promised", "is_enough"), [(596, True), (598, False), (602, False)])
def test_a_plan_is_taken_if_no_other_is_clearly_lower(promised: int, is_enough: bool, promise: Promise) -> None:
    """Half a percent is not worth a round, also where this plan needs more than planned."""
    rounds = rounds_for(MIN)
    first, report = rounds.partitioner, planned(rounds, 500, 500)
    promise(promised)
    assert is_taken(rounds, report, run_of(600)) == (not is_enough)
    assert (rounds.partitioner == first) == (not is_enough)


def test_a_value_that_needs_no_memory_may_make_a_lower_plan(promise: Promise) -> None:
    """`mul` was assumed to be written to memory, so no plan that keeps `mul` in registers was looked at."""
    rounds = rounds_for(MIN)
    promise(400)
    assert not is_taken(rounds, planned(rounds, 500, 500), run_of(500, at="", mul=False))
    assert dict(rounds.partitioner.assumed.stored_again) == {"mul": False}
    assert is_taken(rounds, planned(rounds, 400, 400), run_of(400, at="", mul=False))


def test_the_lowest_plan_that_was_seen_is_gone_back_to(promise: Promise) -> None:
    rounds = rounds_for(MIN)
    tried = []
    for planned_mib, observed, at in ((400, 600, "mm_2"), (410, 550, "mul"), (420, 580, "")):
        tried.append(rounds.partitioner)
        assert not is_taken(rounds, planned(rounds, planned_mib, planned_mib), run_of(observed, at))
    assert rounds.partitioner == tried[1] and rounds.is_settled
    report = planned(rounds, 410, 410)
    assert is_taken(rounds, report, run_of(550, "mul"))
    concluded = rounds.concluded(report)
    assert (concluded.observed_peak_bytes, concluded.floor_bytes) == (550 * MIB, 550 * MIB)


def test_of_plans_as_low_the_last_one_is_taken_without_another_round(promise: Promise) -> None:
    rounds = rounds_for(MIN)
    assert not is_taken(rounds, planned(rounds, 400, 400), run_of(600))
    last = rounds.partitioner
    promise(700)
    assert is_taken(rounds, planned(rounds, 500, 500), run_of(600, "mul"))
    assert rounds.partitioner == last and not rounds.is_settled


def test_no_more_than_six_are_lowered_for_the_lowest(promise: Promise) -> None:
    rounds = rounds_for(MIN)
    tried = []
    for number, at in enumerate((*FORWARD, *BACKWARD, "mm_2")):
        tried.append(rounds.partitioner)
        assert not rounds.is_settled
        assert not is_taken(rounds, planned(rounds, 300, 300), run_of(900 + 10 * abs(number - 2) + number, at))
    assert LOWERED_FOR_LOWEST == 6 and rounds.is_settled and rounds.partitioner == tried[2]


# -- where none fits --------------------------------------------------------------------------------------------------


def no_plan_fits() -> BudgetError:
    error = BudgetError(1000 * MIB, 1100 * MIB, (), "1000MiB", "the logits are returned", 900 * MIB)
    error.graph_key = "0123456789abcdef"
    return error


@pytest.mark.parametrize("asked", [Fit(), SharedOption()], ids=["alone", "the first graph of a step"])
def test_where_the_planner_knows_of_no_plan_that_fits_its_lowest_is_looked_at(asked: Request) -> None:
    rounds = rounds_for(BYTES, asked)
    rounds.failed(no_plan_fits())
    assert rounds.partitioner.request == LOWEST
    report = planned(rounds, 1100, 1100)
    assert is_taken(rounds, report, run_of(950)), "it fits, whatever was expected"
    concluded = rounds.concluded(report)
    assert (concluded.floor_bytes, concluded.predicted_peak_bytes) == (950 * MIB, 950 * MIB)


def test_the_floor_of_the_error_was_observed_and_the_rest_of_it_is_the_planners() -> None:
    rounds = rounds_for(BYTES)
    rounds.failed(no_plan_fits())
    report = planned(rounds, 1100, 1100)
    with pytest.raises(BudgetError) as caught:
        is_taken(rounds, report, run_of(1103, at=""))
    error, before = caught.value, no_plan_fits()
    assert error.floor_bytes == 1103 * MIB
    assert error.largest == rounds.seen[0].report.plan.largest  # type: ignore[union-attr]
    kept = ("budget_bytes", "written", "hint", "constant_floor_bytes", "graph_key")
    assert [getattr(error, name) for name in kept] == [getattr(before, name) for name in kept]
    assert 'set memory_budget to "1103MiB" or more' in str(error)
    with pytest.raises(BudgetError) as again:
        rounds.failed(error)
    assert again.value is error, "nothing is left to try"


def test_the_floor_is_the_lowest_that_was_seen(promise: Promise) -> None:
    rounds = rounds_for(BYTES)
    rounds.failed(no_plan_fits())
    assert not is_taken(rounds, planned(rounds, 1010, 1010), run_of(1200))
    assert not is_taken(rounds, planned(rounds, 1020, 1020), run_of(1150, "mul"))
    with pytest.raises(BudgetError) as caught:
        is_taken(rounds, planned(rounds, 1030, 1030), run_of(1300, at=""))
    assert caught.value.floor_bytes == 1150 * MIB


def test_the_rounds_of_min_come_before_an_error(promise: Promise) -> None:
    """If the planner's floor fits and its code does not, the assumptions so far depend on the budget, and are dropped."""
    rounds = rounds_for(BYTES)
    assert not is_taken(rounds, planned(rounds, 990, 990), run_of(1200))
    assert rounds.partitioner.request == Fit() and not rounds.partitioner.assumed.is_empty
    assert not is_taken(rounds, planned(rounds, 995, 995), run_of(1100, at=""))
    assert rounds.partitioner.request == LOWEST and rounds.partitioner.assumed == NOTHING_ASSUMED
    with pytest.raises(BudgetError) as caught:
        is_taken(rounds, planned(rounds, 1150, 1150), run_of(1150, at=""))
    assert (caught.value.floor_bytes, caught.value.hint) == (1100 * MIB, ""), "the lowest of all that were seen"


def test_a_plan_of_those_rounds_that_fits_is_taken(promise: Promise) -> None:
    rounds = rounds_for(BYTES)
    assert not is_taken(rounds, planned(rounds, 990, 990), run_of(1200))
    assert not is_taken(rounds, planned(rounds, 995, 995), run_of(1100, at=""))
    report = planned(rounds, 1050, 1050)
    assert is_taken(rounds, report, run_of(960))
    concluded = rounds.concluded(report)
    assert (concluded.predicted_peak_bytes, concluded.rounds) == (960 * MIB, 3)


@pytest.mark.parametrize(
    ("budget", "settings"),
    [(MemoryBudget("fraction", 0.5), {}), (BYTES, {"from_auto": True}), (BYTES, {"is_given": False})],
    ids=["a fraction", "auto", "torch's ratio"],
)
def test_a_budget_that_may_be_missed_takes_the_lowest(budget: MemoryBudget, settings: dict[str, Any]) -> None:
    rounds = rounds_for(budget, **settings)
    report = planned(rounds, 990, 990)
    assert is_taken(rounds, report, run_of(1200, at=""))
    assert rounds.concluded(report).observed_peak_bytes == 1200 * MIB


@pytest.mark.parametrize(
    ("request_of_round", "error"),
    [
        (Fit(), TagConflictError(1000, 1100)),
        (Fit(), SharedBudgetError(1000, 1100)),
        (FitBelow(900), BudgetError(1000, 1100)),
        (SharedOption(), SharedBudgetError(1000, 1100)),
        (Replay(("mm",)), BudgetError(1000, 1100)),
    ],
)
def test_other_errors_are_raised_as_they_are(request_of_round: Request, error: BudgetError) -> None:
    rounds = rounds_for(BYTES, request_of_round)
    with pytest.raises(type(error)) as caught:
        rounds.failed(error)
    assert caught.value is error and rounds.partitioner.request == request_of_round
