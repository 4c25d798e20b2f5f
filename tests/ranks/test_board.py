"""Messages between ranks: posts reach all ranks, waits end, failures are reported once, and a lost store is no end."""

from __future__ import annotations

import threading

import pytest
import torch

from compile_remat.errors import BudgetError, PlannerWarning, RankError
from compile_remat.ranks import board as board_module
from compile_remat.ranks.board import Board, current_board, named, note_failure, num_ranks
from tests.ranks.threads import boards, on_all

LONG_S, SHORT_S = 60.0, 0.05


def test_a_process_alone_has_no_board() -> None:
    assert num_ranks() == 1
    assert current_board() is None
    note_failure(BudgetError(1, 2))  # to nobody


def test_one_process_that_stands_for_all_ranks_waits_for_none() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        assert num_ranks() == 1
        assert current_board() is None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_what_all_of_them_announce(size: int) -> None:
    def job(board: Board) -> object:
        board.announce("key", {"bytes": board.rank})
        return board.gather("key", "did nothing", LONG_S)

    assert on_all(boards(size), job) == [{rank: {"bytes": rank} for rank in range(size)}] * size


def test_a_rank_that_does_not_come_is_waited_for_once(recwarn: pytest.WarningsRecorder) -> None:
    here, _, there = boards(3)
    there.announce("first", 2)
    here.announce("first", 0)
    assert here.gather("first", "did not come", SHORT_S) == {0: 0, 2: 2}
    assert [str(w.message) for w in recwarn if w.category is PlannerWarning] == [
        "compile_remat: rank 1 did not come in 0.05 s (rank_timeout); this rank goes on, and does not wait for it again"
    ]
    assert here.silent == {1}
    there.announce("second", 5)
    here.announce("second", 4)
    assert here.gather("second", "did not come", 10 * LONG_S) == {0: 4, 2: 5}  # a wait would be a hang


def test_a_silent_rank_is_heard_when_it_comes_after_all() -> None:
    here, there = boards(2)
    here.silent = {1}
    there.announce("key", 1)
    here.announce("key", 0)
    assert here.gather("key", "did not come", LONG_S) == {0: 0, 1: 1}


def test_nobody_is_waited_for_without_a_timeout(recwarn: pytest.WarningsRecorder) -> None:
    here, _ = boards(2)
    here.announce("key", 0)
    assert here.gather("key", "did not come", 0) == {0: 0}
    assert not here.silent
    assert not recwarn.list


def test_a_rank_that_has_begun_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait goes on beyond the timeout because rank 1 has begun, and ends without rank 2, which has not."""
    here, there, _ = boards(3)
    there.announce("begun", 1)
    here.announce("begun", 0)
    gives_up = threading.Event()
    give_up = here._give_up

    def seen(*args: object) -> None:
        give_up(*args)  # type: ignore[arg-type]
        gives_up.set()

    monkeypatch.setattr(here, "_give_up", seen)
    monkeypatch.setattr(board_module, "PATIENCE", LONG_S / SHORT_S)

    def job(board: Board) -> object:
        if board is there:
            assert gives_up.wait(LONG_S)
        board.announce("done", board.rank)
        return board.gather("done", "did not end", SHORT_S, begun="begun") if board is here else None

    with pytest.warns(PlannerWarning, match="rank 2 did not end"):
        found = on_all([here, there], job)
    assert found[0] == {0: 0, 1: 1}


def test_a_failure_ends_every_wait_and_is_raised_once() -> None:
    here, there = boards(2)
    error = BudgetError(8 << 20, 27 << 20)
    there.fail(error)
    there.raise_failure()  # its own
    with pytest.raises(RankError, match="rank 1 has failed with BudgetError") as raised:
        here.wait("key", LONG_S)
    assert raised.value.ranks == (1,)
    assert str(error) in str(raised.value)
    here.raise_failure()
    there.fail(error)
    with pytest.raises(RankError, match="rank 1"):
        here.gather("key", "did nothing", LONG_S)


def test_a_wait_for_one_key_ends() -> None:
    here, there = boards(2)
    assert here.wait("key", SHORT_S) is None
    there.post("key", {"mm": 7})
    assert here.wait("key", LONG_S) == {"mm": 7}


def test_the_first_value_stays() -> None:
    here, there = boards(2)
    assert here.first("key", "here") == "here"
    assert there.first("key", "there") == "here"


def test_a_store_that_is_gone_leaves_each_rank_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = boards(2)

    class Gone:
        def __getattr__(self, name: str) -> object:
            raise torch.distributed.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(here, "_posts", Gone())
    with pytest.warns(PlannerWarning, match=r"does not answer \(Connection reset"):
        here.announce("key", 0)
    assert here.gather("key", "did nothing", LONG_S) == {}
    assert here.first("key", "mine") == "mine"
    here.fail(BudgetError(1, 2))


@pytest.mark.parametrize(
    ("ranks", "text"), [((3,), "rank 3"), ((2, 0), "ranks 0 and 2"), ((0, 1, 4), "ranks 0, 1 and 4")]
)
def test_ranks_in_words(ranks: tuple[int, ...], text: str) -> None:
    assert named(ranks) == text
