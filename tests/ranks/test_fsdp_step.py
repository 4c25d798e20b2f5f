"""FSDP2's moments, by hand; `test_wrappers` and `forecast/mesh/test_real_ranks` compare them with what ranks measure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compile_remat._torch.ranks.wrappers import FsdpGroup
from compile_remat.ranks.fsdp_step import At, FsdpMoment, fsdp_moments


def group(nbytes: int, *, stays: bool = False, is_outer: bool = False) -> FsdpGroup:
    """A group of two ranks, everything in one dtype, on a GPU."""
    return FsdpGroup(nbytes, nbytes, nbytes, nbytes // 2, nbytes // 2, stays=stays, is_outer=is_outer)


def on_gloo(of: FsdpGroup) -> FsdpGroup:
    return replace(of, gather_copy_bytes=of.gathered_bytes, reduce_copy_bytes=of.reduced_bytes)


def moments(groups: list[FsdpGroup]) -> list[FsdpMoment]:
    return list(fsdp_moments(groups, [k for k, group in enumerate(groups) if not group.is_outer]))


@pytest.mark.parametrize(
    ("groups", "beside", "step"),
    [
        ([group(100)], 200, 200),  # gathered flat and copied out; reduced: gradients and input
        ([on_gloo(group(100))], 250, 250),  # reduced: input, gloo's copy of it, output
        ([group(100, stays=True)], 200, 200),
        ([group(100)] * 4, 450, 500),  # the first: copied out, beside one being reduced and three shards
        ([group(100, stays=True)] * 4, 600, 600),  # four of them, and two more on the way
        ([group(40, stays=True, is_outer=True), group(100), group(100)], 390, 390),
        ([], 0, 0),
    ],
)
def test_the_most_of_a_step(groups: list[FsdpGroup], beside: int, step: int) -> None:
    found = moments(groups)
    assert max((m.beside_bytes for m in found), default=0) == beside
    assert max((m.beside_bytes + m.gradient_bytes for m in found), default=0) == step


def test_each_moment_of_two_blocks_inside_an_outer_group() -> None:
    outer, first, second = group(10, stays=True, is_outer=True), group(100), group(200)
    found = list(fsdp_moments([outer, first, second], [None, 1, 2, None]))
    assert [(m.at, m.place, m.beside_bytes, m.gradient_bytes) for m in found] == [
        (At.GATHER, 0, 10, 0),
        (At.COPY_OUT, 0, 20, 0),
        (At.FORWARD, 0, 20, 0),
        (At.GATHER, 1, 120, 0),  # beside the outer group's flat copy
        (At.COPY_OUT, 1, 220, 0),
        (At.FORWARD, 1, 210, 0),
        (At.GATHER, 2, 310, 0),
        (At.COPY_OUT, 2, 510, 0),
        (At.FORWARD, 2, 410, 0),
        (At.FORWARD, 3, 210, 0),  # the last flat copy stays until the model's forward has ended
        (At.AHEAD, 3, 210, 0),
        (At.BACKWARD, 3, 210, 0),
        (At.COPY_OUT_AGAIN, 2, 410, 0),
        (At.AHEAD, 2, 310, 0),
        (At.BACKWARD, 2, 310, 200),
        (At.COPY_IN, 2, 310, 200),
        (At.REDUCE, 2, 410, 0),
        (At.COPY_OUT_AGAIN, 1, 510, 0),  # beside the last reduction's input and this rank's part of it
        (At.BACKWARD, 1, 410, 100),
        (At.COPY_IN, 1, 210, 100),
        (At.REDUCE, 1, 260, 0),
        (At.BACKWARD, 0, 260, 0),
        (At.COPY_IN, 4, 160, 10),
        (At.REDUCE, 4, 165, 0),
    ]


def test_a_group_that_does_not_stay_is_gathered_again_around_the_blocks() -> None:
    found = list(fsdp_moments([group(10, is_outer=True), group(100)], [1, None]))
    again = [(m.at, m.place, m.beside_bytes) for m in found if m.at in (At.GATHER_AGAIN, At.COPY_OUT_AGAIN)]
    assert again == [(At.GATHER_AGAIN, 1, 10), (At.COPY_OUT_AGAIN, 1, 20), (At.COPY_OUT_AGAIN, 0, 210)]


def test_another_type_of_the_forward_is_cast_before_and_behind_the_collectives() -> None:
    """Parameters of 4 bytes an element, of which 2 are gathered and reduced."""
    mixed = FsdpGroup(100, 100, 100, 50, 100, last_gradient_bytes=8, gather_cast_bytes=50)
    by_kind = {m.at: (m.beside_bytes, m.gradient_bytes) for m in moments([mixed])}
    assert by_kind[At.GATHER] == by_kind[At.GATHER_AGAIN] == (150, 0)
    assert by_kind[At.COPY_IN] == (100, 100)
    assert by_kind[At.REDUCE] == (150, 8) and by_kind[At.CAST_BACK] == (250, 8)


def test_a_block_that_runs_twice_is_gathered_and_reduced_twice_and_has_one_part_of_its_gradients() -> None:
    found = list(fsdp_moments([group(100)], [0, 0]))
    assert [m.place for m in found if m.at is At.GATHER] == [0, 1]
    assert [m.beside_bytes for m in found if m.at is At.COPY_IN] == [100, 150]
    assert found[-1].beside_bytes == 200


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    frozen = FsdpGroup(100, 0, 0, 0, 0)
    reducing = {At.COPY_IN, At.REDUCE, At.CAST_BACK}
    assert {m.at for m in moments([frozen])} == set(At) - reducing - {At.AHEAD}
