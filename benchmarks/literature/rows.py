"""Rows stored for each source: points of memory and time, largest batches, and frontiers for the pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.harness import percent

ROUNDING = 0.0005
"""Sources round to a tenth of a per cent: a time that is less than half of that above theirs is theirs."""


@dataclass(frozen=True)
class PointRow:
    """One point of one network, in bytes as the source counts them.

    Attributes:
        setting: Name of the point, in the source's words.
        device: Device whose cost model prices the point; empty if the source counts operations.
        baseline_bytes: Peak without a plan: as reported, or of the rebuilt network if the source gives parts of its baseline.
        published_bytes, published_extra: The point; the time is a part of the source's own baseline, None if no time was found.
        eager_bytes: The rebuilt network's peak in eager mode; None if the source has no eager mode.
        fastest_bytes, floor_bytes: Peaks of our fastest plan and of our lowest one.
        extra: Extra time of our plan within the published bytes, over our fastest plan; None if no plan fits.
        bound: Proven lower bound on `extra`; None if no plan fits.
        bytes_at_its_time: Lowest peak of our plans that take no longer than the published point; None if the point has no time,
            or a time below zero.
        remark: The reason why the row does not compare like with like, or why our plan is worse.
    """

    source: str
    network: str
    setting: str
    device: str
    baseline_bytes: int
    published_bytes: int
    published_extra: float | None
    eager_bytes: int | None
    fastest_bytes: int
    floor_bytes: int
    extra: float | None
    bound: float | None
    bytes_at_its_time: int | None
    remark: str = ""

    @property
    def is_comparable(self) -> bool:
        """True if the source gives an extra time of at least zero: below zero, its kernels are faster than its own baseline's."""
        return self.published_extra is not None and self.published_extra >= 0

    @property
    def verdict(self) -> str:
        """Says how our plan is worse; empty if it is not, or if the point cannot be compared."""
        if self.extra is None:
            over = self.floor_bytes / self.published_bytes - 1
            return f"no plan of ours fits: the lowest takes {percent(over)} more"
        if self.is_comparable and self.extra > (self.published_extra or 0.0) + ROUNDING:
            return f"{percent(self.extra - (self.published_extra or 0.0))} of the step slower"
        return ""


@dataclass(frozen=True)
class BatchRow:
    """The largest batch of a network whose step takes at most one forward more.

    Attributes:
        published_batch, batch: The source's and ours.
        most: No plan can reach more: by a proven bound of the peak.
        baseline_batch: Ours without recomputation.
    """

    source: str
    network: str
    published_batch: int
    batch: int
    most: int
    baseline_batch: int
    remark: str = ""

    @property
    def verdict(self) -> str:
        short = 1 - self.batch / self.published_batch
        return f"{percent(short)} fewer" if short > 0 else ""


@dataclass(frozen=True)
class FrontierRow:
    """Plans from the fastest to the lowest, as bytes and extra time, for the pictures; not in the tables.

    Attributes:
        published: The source's points, in the same units.
        policies: Points of rules that people use, by name.
    """

    source: str
    network: str
    unit: str
    points: list[list[float]]
    published: list[list[float]]
    policies: dict[str, list[list[float]]]


Row = PointRow | BatchRow | FrontierRow


def row_of(fields: dict[str, Any]) -> Row:
    """A row of a stored file."""
    if "points" in fields:
        return FrontierRow(**fields)
    return BatchRow(**fields) if "published_batch" in fields else PointRow(**fields)


def rows_of(fields: Sequence[dict[str, Any]], source: str) -> list[Row]:
    """The rows of one source."""
    return [row_of(each) for each in fields if each["source"] == source]


class Store:
    """Rows that are stored network by network, so that an interrupted run goes on with the next network.

    Args:
        path: File that the rows are read from and written to; None for no file.
    """

    def __init__(self, path: Path | None, head: dict[str, str]) -> None:
        self._path, self._head = path, head
        is_there = path is not None and path.exists()
        self.rows: list[Row] = [row_of(each) for each in stored(path)] if path is not None and is_there else []

    def has(self, source: str, network: str) -> bool:
        return any((row.source, row.network) == (source, network) for row in self.rows)

    def put(self, rows: Iterator[Row]) -> None:
        """Store all rows of a network."""
        self.rows += rows
        harness.write_json(self._path, self._head, self.rows)


def stored(path: Path) -> list[dict[str, Any]]:
    """The fields of each row of a stored file."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found
