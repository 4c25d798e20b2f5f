"""Training on two and four gloo processes: one plan on all ranks, eager mode's losses, peaks inside the budget, and no hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_remat.ranks.wrappers import NOTHING_HELD
from tests.ranks import jobs
from tests.ranks.models import ROWS, WRAPPERS, Seen, eager_loss_bytes, trained, width_of
from tests.ranks.processes import JobError, Ranks, ranks_of

MIB = 1 << 20


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.proof), 4])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    found: Ranks = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return found


def assert_like_eager(seen: list[Seen], eager: list[Seen]) -> None:
    for own, other in zip(seen, eager, strict=True):
        assert own.losses == pytest.approx(other.losses, rel=1e-5)
    assert seen[0].plans
    assert all(own.plans == seen[0].plans for own in seen)


_EAGER: dict[tuple[int, int, bool], list[Seen]] = {}


def eager(ranks: Ranks, wrapper: str) -> list[Seen]:
    """Results of the same ranks in eager mode: all wrappers but tensor parallelism have the same data and losses."""
    key = ranks.size, width_of(wrapper), wrapper == "tp"
    if key not in _EAGER:
        _EAGER[key] = ranks(trained, wrapper, None)
    return _EAGER[key]


@pytest.mark.parametrize(
    "wrapper", [pytest.param(w, marks=[pytest.mark.proof] * (w == "fsdp blocks, reshard")) for w in WRAPPERS]
)
def test_every_rank_has_the_same_plans_and_the_losses_of_eager_mode(two: Ranks, wrapper: str) -> None:
    assert_like_eager(two(trained, wrapper, {"memory_budget": "min"}), eager(two, wrapper))


@pytest.mark.full
@pytest.mark.parametrize("second_bytes", [96 * MIB, MIB // 2], ids=["less", "none for a tensor"])
def test_ranks_send_the_same_tensors_to_hosts_with_other_free_memory(two: Ranks, second_bytes: int) -> None:
    (first, moved), (second, also) = two(jobs.moving, [256 * MIB, second_bytes])
    assert_like_eager([first, second], two(trained, "ddp", None, jobs.LARGE_ROWS))
    assert moved == also
    assert bool(moved) == (second_bytes > MIB)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_gradients_leave_early_in_the_same_order_on_all_ranks(two: Ranks, compiler: str) -> None:
    """Hooks may hold collectives of their own."""
    first, second = two(jobs.order_of_gradients, compiler)
    assert first == second and len(first) == len(set(first)) > 1


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp blocks, reshard", "tp"])
def test_so_have_four_ranks(four: Ranks, wrapper: str) -> None:
    options = {"memory_budget": "min", "compiler": "eager"}
    assert_like_eager(four(trained, wrapper, options), eager(four, wrapper))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp whole, reshard", "fsdp blocks, keep", "fsdp blocks, reshard", "tp"])
def test_auto_is_the_least_that_is_free_on_any_rank_and_the_whole_step_keeps_it(two: Ranks, wrapper: str) -> None:
    """The budget counts the memory of the wrapper: gathered parameters, buckets, and gradients on their way.

    The budget leaves out a loss outside of the compiled blocks: `auto` knows of no code that torch runs by itself.
    """
    free = [4 * MIB, 5 * MIB // 2 if wrapper == "tp" else 13 * MIB // 4]
    options = {"capacity": jobs.CAPACITY_BYTES, "reserve": "0", "optimizer_state": "none", "rank_timeout": 30}
    found = two(jobs.trained_within, wrapper, options, free)
    seen = [own for own, _ in found]
    assert_like_eager(seen, eager(two, wrapper))
    budgets = [budget for own in seen for *_, budget in own.plans if budget is not None]
    first = [known[0] if known else NOTHING_HELD for _, known in found]
    assert any(held.beside_bytes for held in first) == (wrapper != "tp")
    assert budgets and max(budgets) <= min(free) - max(held.coming_bytes for held in first)
    # By the time that `auto` asks: the first group, gathered and flat.
    present_bytes = max(held.present_bytes for held in first)
    assert max(own.peak_bytes for own in seen) <= min(free) + present_bytes + eager_loss_bytes(wrapper)


def test_a_budget_of_its_own_on_one_rank_is_an_error_on_all(two: Ranks) -> None:
    options = [{"memory_budget": budget, "compiler": "eager"} for budget in ("max", "min")]
    found = two(jobs.error_of, options, [ROWS, ROWS])
    assert [kind for kind, *_ in found] == ["RankError"] * 2
    assert {ranks for *_, ranks in found} == {(0, 1)}
    assert all("rank 0: plan" in text and "rank 1: plan" in text for _, text, _ in found)


def test_with_a_timeout_of_nothing_ranks_may_differ(two: Ranks) -> None:
    options = [{"memory_budget": budget, "compiler": "eager", "rank_timeout": 0} for budget in ("max", "min")]
    assert two(jobs.error_of, options, [ROWS, ROWS]) == [("", "", ())] * 2


def test_a_budget_error_on_one_rank_keeps_no_other_one_waiting(ranks: Ranks) -> None:
    """Its batch is eight times as large, and nothing fits; the others' plans would."""
    last = ranks.size - 1
    options = [{"memory_budget": "2.5MiB", "compiler": "eager"}] * ranks.size
    found = ranks(jobs.error_of, options, [ROWS] * last + [8 * ROWS])
    assert [kind for kind, *_ in found] == ["RankError"] * last + ["BudgetError"]
    for _, text, named in found[:last]:
        assert named == (last,)
        assert f"rank {last} has failed with BudgetError" in text
        assert "the lowest reachable peak of this graph is" in text


def test_a_rank_that_compiles_alone_waits_for_nobody(two: Ranks) -> None:
    """Sizes that change on rank 1 only: it compiles a second variant while rank 0 is in a collective."""
    assert two(jobs.sizes_of_its_own, [[64, 64, 64], [64, 96, 160]]) == [[1, 1, 1], [1, 2, 2]]


def test_first_batches_of_other_sizes_are_no_error(two: Ranks) -> None:
    assert two(jobs.sizes_of_its_own, [[64], [96]]) == [[1], [1]]


def test_a_rank_that_hits_a_cache_alone_has_said_its_plan(two: Ranks, tmp_path: Path) -> None:
    first = two(jobs.trained_from_cache, str(tmp_path), [True, True])
    found = two(jobs.trained_from_cache, str(tmp_path), [True, False])
    assert [cached for cached, _ in found] == [[True], [False]]
    assert found[0][1] == found[1][1] == first[0][1]


def test_what_one_rank_compiles_alone_is_waited_for_once(two: Ranks) -> None:
    options = {"memory_budget": "min", "compiler": "eager", "rank_timeout": 1}
    (warned, nothing) = two(jobs.trained_beside_a_late_rank, options)
    assert len(warned) == 1
    assert "rank 1 did not say how Stack.forward (models.py:" in warned[0]
    assert nothing == []


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["", "checkpointed"])
def test_no_plan_computes_a_collective_twice(two: Ranks, is_checkpointed: bool) -> None:
    for joint, both, again in two(jobs.collectives, "min", is_checkpointed):
        assert joint == both > 2
        assert again > 10


def test_a_graph_says_whether_it_communicates(two: Ranks) -> None:
    assert two(jobs.told_by, "tp") == two(jobs.told_by, "collective") == [[True]] * 2
    assert two(jobs.told_by, "ddp") == [[False]] * 2


@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.proof)])
def test_a_rank_that_runs_out_of_memory_plans_again_alone(two: Ranks, place: str) -> None:
    assert two(jobs.out_of_memory, "ddp", place) == [("", [], 1), ("", [], 2)]


def test_a_graph_with_collectives_does_not_run_again_on_one_rank(two: Ranks) -> None:
    (fine, (error, notes, _)) = two(jobs.out_of_memory, "collective", "forward")
    assert fine == ("", [], 1)
    assert error == "OutOfMemoryError"
    assert "the graph communicates with other ranks, which do not run it again" in notes[-1]


def test_a_job_that_hangs_fails_the_test() -> None:
    with ranks_of(2) as ranks, pytest.raises(JobError, match="a hang"):
        ranks(jobs.hang, timeout_s=0.5)
