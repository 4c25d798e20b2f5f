"""Dataclasses read from JSON that anybody may have written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import pytest

from compile_remat._util.json_values import parse, read_as


class Kind(StrEnum):
    SMALL = "small: as text"


@dataclass(frozen=True)
class Part:
    name: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    count: int
    share: float
    kind: Kind
    parts: tuple[Part, ...]
    limit: int | None = None
    pair: tuple[str, int] = ("", 0)


GOOD: dict[str, Any] = {
    "count": 3,
    "share": 1,
    "kind": "SMALL",
    "parts": [{"name": "a", "shape": [1, 2]}],
    "limit": None,
}


def test_all_kinds_of_fields() -> None:
    whole = read_as(Whole, GOOD)
    assert whole == Whole(3, 1.0, Kind.SMALL, (Part("a", (1, 2)),))
    assert type(whole.share) is float and hash(whole)
    assert read_as(Whole, {**asdict(whole), "kind": "SMALL", "parts": [], "pair": ["", 0], "limit": 5}).limit == 5
    assert read_as(Whole, {**GOOD, "pair": ["a", 1]}).pair == ("a", 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": True}, "Whole.count is True, no int"),
        ({"count": 1.5}, "Whole.count is 1.5, no int"),
        ({"count": None}, "Whole.count is None, no int"),
        ({"share": "x" * 99}, "Whole.share is 'xxx.*no float"),
        ({"kind": "LARGE"}, "Whole.kind is 'LARGE', none of SMALL"),
        ({"kind": []}, "Whole.kind is list, none of SMALL"),
        ({"parts": None}, "Whole.parts is None, no list"),
        ({"parts": [{"name": "a", "shape": [[1]]}]}, r"Whole.parts\[0\].shape\[0\] is list, no int"),
        ({"parts": [3]}, r"Whole.parts\[0\] is 3, no object"),
        ({"parts": [{}]}, r"Whole.parts\[0\] lacks the field 'name'"),
        ({"limit": {}}, "Whole.limit is dict, no int"),
        ({"pair": ["a"]}, "Whole.pair has 1 items, not 2"),
        ({"pair": ["a", "b"]}, r"Whole.pair\[1\] is 'b', no int"),
        ({"more": 1}, "Whole has no field 'more'"),
    ],
)
def test_a_field_that_is_off_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_as(Whole, {**GOOD, **change})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)
