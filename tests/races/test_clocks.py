"""Happens-before by hand: which pairs of accesses are races."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.races.clocks import HOST, Access, Event, Mark, Wait, has_race, races, waits

COPY = "copies"
KERNELS = "kernels"


def access(agent: str, storage: int, *, writes: bool = False, first: int = 0, end: int = 8) -> Access:
    return Access(agent, "it", storage, first, end, writes)


def wait(agent: str, mark: int, number: int = 0) -> Wait:
    return Wait(agent, mark, "kind", number)


ORDERED: dict[str, Sequence[Event]] = {
    "one agent": [access(COPY, 0, writes=True), access(COPY, 0, writes=True)],
    "two reads": [access(KERNELS, 0), access(COPY, 0)],
    "other bytes": [access(KERNELS, 0, writes=True, end=4), access(COPY, 0, writes=True, first=4)],
    "other storages": [access(KERNELS, 0, writes=True), access(COPY, 1, writes=True)],
    "a wait": [access(KERNELS, 0, writes=True), Mark(KERNELS, 7), wait(COPY, 7), access(COPY, 0)],
    "through a third": [
        access(KERNELS, 0, writes=True), Mark(KERNELS, 1), wait("third", 1), Mark("third", 2), wait(COPY, 2), access(COPY, 0),
    ],
    "the host has waited": [access(COPY, 0, writes=True), Mark(COPY, 1), wait(HOST, 1), access(KERNELS, 0)],
}  # fmt: skip
RACES: dict[str, Sequence[Event]] = {
    "no wait": [access(KERNELS, 0, writes=True), access(COPY, 0)],
    "a read before a write": [access(COPY, 0), access(KERNELS, 0, writes=True)],
    "a mark before the write": [Mark(KERNELS, 7), access(KERNELS, 0, writes=True), wait(COPY, 7), access(COPY, 0)],
    "a wait behind the read": [access(KERNELS, 0, writes=True), Mark(KERNELS, 7), access(COPY, 0), wait(COPY, 7)],
    "another's wait": [access(KERNELS, 0, writes=True), Mark(KERNELS, 7), wait("third", 7), access(COPY, 0)],
    "the host's kernels began earlier": [
        access(KERNELS, 0, writes=True), access(COPY, 0), Mark(COPY, 1), wait(HOST, 1), access(KERNELS, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_in_order(name: str) -> None:
    assert list(races(ORDERED[name])) == []


@pytest.mark.parametrize("name", RACES)
def test_what_is_not(name: str) -> None:
    (race,) = races(RACES[name])
    assert "in no order" in str(race)


@pytest.mark.parametrize("name", ["a wait", "through a third", "the host has waited"])
def test_without_its_waits_there_is_a_race(name: str) -> None:
    assert waits(ORDERED[name]) and has_race(ORDERED[name], [0])
