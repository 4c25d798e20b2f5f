"""A rank's step, moment by moment, by hand; `test_real_ranks` compares the sums with what ranks measure."""

from __future__ import annotations

import pytest

from compile_remat._torch.ranks.wrappers import FsdpGroup, FsdpTree
from compile_remat.forecast.mesh.rank_trace import GraphCall
from compile_remat.forecast.mesh.shards import Shards
from compile_remat.forecast.mesh.step_moments import GraphBytes, StepMoment, moments_of, places_of, wrapper_bytes
from compile_remat.planning.joint_allocation import RegionCall
from compile_remat.ranks.wrappers import Held

OUTER = FsdpGroup(10, 10, 10, 5, 5, stays=True, is_outer=True)
BLOCK = FsdpGroup(100, 100, 100, 50, 50)
ENTER, OWN, LEAVE = GraphBytes(3, 4, 3, 0), GraphBytes(1000, 1500, 900, 7), GraphBytes(20, 30, 9, 0)
CALLS = [GraphCall(0), GraphCall(1, 0), GraphCall(1, 1), GraphCall(2)]
REGIONS = [RegionCall(0, 4), RegionCall(1, 0), RegionCall(1, 0), RegionCall(2, 6)]


def shards(tree: FsdpTree | None, beside_bytes: int = 0) -> Shards:
    return Shards(105, 105, 50, Held(beside_bytes, 0, 0), tree)


def found(tree: FsdpTree) -> list[StepMoment]:
    return moments_of(CALLS, REGIONS, [ENTER, OWN, LEAVE], shards(tree), optimizer_bytes=77)


TREE = FsdpTree((OUTER, BLOCK, BLOCK), 105, 0)


@pytest.mark.parametrize(
    ("at", "where", "graph_bytes", "wrapper_bytes"),
    [
        ("forward", "around the blocks", 3, 20),
        ("copy out", "block 1 of 2", 3, 220),
        ("forward", "block 2 of 2", 3 + 900 + 1000, 210),
        ("forward", "around the blocks", 3 + 2 * 900 + 20, 110),
        ("gather ahead", "around the blocks", 3 + 2 * 900 + 9, 110),
        ("backward", "around the blocks", 3 + 2 * 900 + 30, 110),
        # The last graph's gradients wait for the end; what comes in lies beside the outputs that the backward reads.
        ("gather ahead", "block 2 of 2", 3 + 2 * 900 + 6 + 7, 210),
        ("backward", "block 2 of 2", 3 + 900 + 1500 + 6 + 7, 210),
        ("copy in", "block 2 of 2", 3 + 900 + 6 + 7 + 100, 210),
        ("reduce", "block 1 of 2", 3 + 6, 210),
        ("backward", "around the blocks", 4 + 6, 210),
        ("copy in", "parameters of no block", 10, 110),
        ("optimizer", "", 77, 105),
    ],
)
def test_a_moment_of_two_blocks(at: str, where: str, graph_bytes: int, wrapper_bytes: int) -> None:
    assert StepMoment(at, where, graph_bytes, wrapper_bytes) in found(TREE)


def test_the_most_at_each_place() -> None:
    assert places_of(CALLS, shards(TREE)) == [None, 1, 2, None]
    most = wrapper_bytes(CALLS, shards(TREE))
    assert most == [210, 360, 310, 115]
    by_place = [max(m.nbytes for m in found(TREE) if m.where == where) for where in ("block 1 of 2", "block 2 of 2")]
    assert by_place == [3 + 1500 + 6 + 7 + 260, 3 + 900 + 1500 + 6 + 7 + 210]


def test_a_group_around_the_whole_model_runs_one_graph() -> None:
    whole = FsdpTree((BLOCK,), 50, 0)
    assert places_of([GraphCall(0)], shards(whole)) == [0]
    seen = moments_of([GraphCall(0)], [RegionCall(0, 100)], [OWN], shards(whole), 77)
    assert [(m.at, m.where, m.nbytes) for m in seen if m.at in ("forward", "backward", "copy in")] == [
        ("forward", "the model", 1000 + 200),
        ("backward", "the model", 1500 + 100),
        ("copy in", "the model", 100 + 100),
    ]


def test_the_buckets_of_ddp_are_there_from_the_start() -> None:
    seen = moments_of([GraphCall(0)], [RegionCall(0, 100)], [OWN], shards(None, beside_bytes=100), 77)
    assert seen == [
        StepMoment("forward", "the model", 1000, 100),
        StepMoment("backward", "the model", 1500, 100),
        StepMoment("optimizer", "", 77 + 105, 100),
    ]


def test_under_ddp_gradients_of_later_pieces_wait() -> None:
    calls, regions = [GraphCall(0), GraphCall(0)], [RegionCall(0, 100), RegionCall(0, 100)]
    seen = moments_of(calls, regions, [OWN, OWN], shards(None, beside_bytes=100), 77)
    assert [(m.at, m.where, m.graph_bytes) for m in seen[:-1]] == [
        ("forward", "piece 1 of 2", 1000),
        ("forward", "piece 2 of 2", OWN.held_bytes + 1000),
        ("backward", "piece 2 of 2", OWN.held_bytes + 1500),
        ("backward", "piece 1 of 2", 100 + OWN.kept_output_bytes + 1500),
    ]
