"""One graph on several ranks: one budget, one set of times, one plan; who differs is named, and who fails is heard of."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import fx

from compile_remat.errors import BudgetError, PlannerWarning, RankError
from compile_remat.ranks import agreement as agreement_module
from compile_remat.ranks.agreement import Agreement, agreed_again
from compile_remat.ranks.board import Board
from compile_remat.ranks.places import Place
from tests.ranks.threads import boards, on_all

LONG_S, SHORT_S = 60.0, 0.05
FIRST, LATER = Place("f #1.0", is_first=True), Place("f #1.0", is_first=False)
SAVED = ("add", "mm")


def agreed(board: Board | None, *, graph: str = "g", place: Place = FIRST, timeout_s: float = LONG_S) -> Agreement:
    return Agreement(board, place, graph, timeout_s)


def conclude(board: Board, saved: tuple[str, ...] | None, graph: str = "g", **given: Any) -> None:
    with agreed(board, graph=graph, place=given.pop("place", FIRST), timeout_s=given.pop("timeout_s", LONG_S)) as own:
        own.conclude(saved, given.pop("budget_bytes", 1 << 20), **{"from_auto": False, **given})


def test_a_graph_without_a_backward_is_agreed_on_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = boards(2)
    monkeypatch.setattr(agreement_module, "current_board", lambda: here)
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    weight = torch.ones(2, requires_grad=True)
    assert Agreement.of(gm, [torch.ones(2)], LONG_S)._board is None
    with torch.no_grad():
        assert Agreement.of(gm, [weight], LONG_S)._board is None
    assert Agreement.of(gm, [weight], LONG_S)._board is here


def test_alone_every_figure_is_the_own_one() -> None:
    with agreed(None) as own:
        assert own.smallest(700, "cpu auto") == 700
        assert own.smallest(None, "cpu auto") is None
        assert own.from_rank_zero(lambda: {"mm": 7}) == {"mm": 7}
        own.conclude(SAVED, 1, from_auto=True)
    assert agreed_again(700, "cpu auto", LONG_S) == 700


@pytest.mark.parametrize(
    ("figures", "smallest"), [((700, 500, 600), 500), ((None, 500, 600), 500), ((None,) * 3, None)]
)
def test_all_ranks_take_the_smallest_figure(figures: tuple[int | None, ...], smallest: int | None) -> None:
    found = on_all(boards(3), lambda board: agreed(board).smallest(figures[board.rank], "cpu auto"))
    assert found == [smallest] * 3


@pytest.mark.parametrize(("offers", "smallest"), [((700, 500, 600), 500), ((None, 500, 600), 500), ((None,) * 3, None)])
def test_all_ranks_take_the_smallest_host_memory(offers: tuple[int | None, ...], smallest: int | None) -> None:
    """Told together with the figure of `auto`, of which each rank has another one."""

    def asked(board: Board) -> tuple[int | None, int | None, int | None]:
        own, offer = agreed(board), offers[board.rank]
        if offer is not None:
            own.offer_host(offer)
        later = agreed(board, place=LATER)
        return own.smallest(100 + board.rank, "cpu auto"), own.smallest_host(), later.smallest_host()

    assert on_all(boards(3), asked) == [(100, smallest, smallest)] * 3


def test_alone_the_host_memory_is_the_own_one() -> None:
    own = agreed(None)
    assert own.smallest_host() is None
    own.offer_host(700)
    assert own.smallest_host() == 700


def test_a_later_variant_asks_nobody_and_takes_what_was_agreed_on() -> None:
    here, _ = boards(2)
    assert agreed(here, place=LATER).smallest(700, "cpu auto") == 700  # nothing was
    here.agreed_bytes["cpu auto"] = 500
    assert agreed(here, place=LATER).smallest(700, "cpu auto") == 500
    assert agreed(here, place=LATER).smallest(700, "cuda auto") == 700
    assert agreed(here, place=LATER).from_rank_zero(lambda: {"mm": 7}) == {"mm": 7}
    with agreed(here, place=LATER) as own:
        own.conclude(SAVED, 1, from_auto=False)


def test_the_level_that_is_read_again_is_the_smallest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    both = boards(2)
    by_thread: dict[str, Board] = {}
    import threading

    monkeypatch.setattr(agreement_module, "current_board", lambda: by_thread[threading.current_thread().name])

    def job(board: Board) -> list[int | None]:
        by_thread[threading.current_thread().name] = board
        return [agreed_again(figures[board.rank], "cpu auto", LONG_S) for figures in ((7, 5), (3, 4))]

    assert on_all(both, job) == [[5, 3]] * 2
    assert [board.agreed_bytes for board in both] == [{"cpu auto": 3}] * 2


def test_all_ranks_take_the_times_of_rank_zero() -> None:
    found = on_all(boards(3), lambda board: agreed(board).from_rank_zero(lambda: {"mm": board.rank + 7}))
    assert found == [{"mm": 7}] * 3


def test_times_of_another_graph_are_measured_here() -> None:
    def job(board: Board) -> Any:
        return agreed(board, graph=f"g{board.rank}").from_rank_zero(lambda: {"mm": board.rank})

    assert on_all(boards(2), job) == [{"mm": 0}, {"mm": 1}]


# -- plans ------------------------------------------------------------------------------------------------------------


def test_equal_plans_are_no_news(recwarn: pytest.WarningsRecorder) -> None:
    assert on_all(boards(4), lambda board: conclude(board, SAVED)) == [None] * 4
    assert not recwarn.list


def test_a_difference_is_an_error_on_all_ranks_that_names_them() -> None:
    def job(board: Board) -> None:
        conclude(board, SAVED if board.rank != 1 else ("mm",), budget_bytes=(board.rank == 1) + 1 << 20)

    found = on_all(boards(3), job)
    assert [type(error) for error in found] == [RankError] * 3
    assert len({str(error) for error in found}) == 1
    assert "ranks 0 and 2: plan" in str(found[0]) and "budget 1.0 MiB; rank 1: plan" in str(found[0])
    assert "budget 2.0 MiB" in str(found[0]) and "f #1.0" in str(found[0])
    assert found[0].ranks == (0, 1, 2)


def test_plans_that_differ_because_of_a_late_figure_are_a_warning() -> None:
    """Rank 0 gave up waiting for what is free on rank 1, which has said so already when the plans are compared."""

    def job(board: Board) -> None:
        conclude(board, SAVED[board.rank :], budget_bytes=board.rank, from_auto=True)

    with pytest.warns(PlannerWarning, match="a rank did not wait for the others"):
        assert on_all(boards(2), job) == [None] * 2


def test_another_graph_or_one_without_a_plan_may_have_what_plan_it_likes(caplog: pytest.LogCaptureFixture) -> None:
    def job(board: Board) -> None:
        conclude(board, [SAVED, ("mm",), None][board.rank], graph="h" if board.rank == 1 else "g")

    with caplog.at_level(logging.INFO, "compile_remat"):
        assert on_all(boards(3), job) == [None] * 3
    assert "another graph on rank 1," in caplog.text


def test_the_rank_that_comes_last_is_no_error_where_the_others_went_on() -> None:
    """The other ranks may be in a collective by then, where an error of the last rank would leave them waiting."""
    here, there = boards(2)
    with pytest.warns(PlannerWarning, match=r"rank 1 did not say how f #1\.0 is planned"):
        conclude(here, SAVED, timeout_s=SHORT_S)
    with pytest.warns(PlannerWarning, match=r"rank 0: plan .*; rank 1: plan .* training goes on"):
        conclude(there, ("mm",))


def test_a_rank_that_gives_up_hears_of_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 raises between the end of rank 0's wait and what rank 0 does next."""
    here, there = boards(2)
    give_up = here._give_up

    def late(*args: Any) -> None:
        with pytest.raises(RankError):
            conclude(there, ("mm",))
        give_up(*args)

    monkeypatch.setattr(here, "_give_up", late)
    with pytest.warns(PlannerWarning, match="rank 1 did not say"), pytest.raises(RankError, match="rank 1: plan"):
        conclude(here, SAVED, timeout_s=SHORT_S)


def test_without_a_timeout_plans_may_differ(recwarn: pytest.WarningsRecorder) -> None:
    here, there = boards(2)
    conclude(here, SAVED, timeout_s=0)
    conclude(there, ("mm",), timeout_s=0)
    assert not recwarn.list


def test_a_later_variant_may_differ(caplog: pytest.LogCaptureFixture) -> None:
    here, there = boards(2)
    with caplog.at_level(logging.INFO, "compile_remat"):
        conclude(here, SAVED, place=LATER)
        conclude(there, SAVED, place=LATER)
        assert not caplog.records
        conclude(there, ("mm",), place=LATER)
    assert "plans of a later variant (f #1.0) differ" in caplog.text


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_rank_without_a_plan_keeps_no_other_one_waiting() -> None:
    def job(board: Board) -> None:
        with agreed(board, graph=f"g{board.rank}") as own:  # its batch is larger
            own.begin()
            if board.rank == 1:
                raise BudgetError(8 << 20, 27 << 20)
            own.conclude(SAVED, 8 << 20, from_auto=False)

    found = on_all(boards(3), job)
    assert [type(error) for error in found] == [RankError, BudgetError, RankError]
    assert found[0].ranks == (1,)
    assert "rank 1 has failed with BudgetError" in str(found[0])
    assert "the lowest reachable peak of this graph is 27.0 MiB" in str(found[0])


@pytest.mark.parametrize("place", [FIRST, LATER])
def test_an_error_that_is_not_ours_ends_the_wait_as_well(place: Place) -> None:
    """Dynamo may run the graph in eager mode: it is no failure, and has no plan."""

    def job(board: Board) -> None:
        with agreed(board, place=place) as own:
            if board.rank == 1:
                raise ValueError("no such operator")
            own.conclude(SAVED, 8 << 20, from_auto=False)

    found = on_all(boards(2), job)
    assert found[0] is None
    assert type(found[1]) is ValueError


def test_a_failure_of_an_earlier_graph_is_heard_of_at_the_next_one() -> None:
    here, there = boards(2)
    with pytest.raises(BudgetError), agreed(there, place=LATER):
        raise BudgetError(1, 2)
    with pytest.raises(RankError, match="rank 1"):
        conclude(here, SAVED)
