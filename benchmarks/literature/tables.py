"""Tables and summaries of each source."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, median

from benchmarks.common.harness import percent
from benchmarks.literature.rows import BatchRow, FrontierRow, PointRow, Row
from benchmarks.literature.sources import SOURCES

Table = tuple[Sequence[str], Sequence[Sequence[str]]]

BATCH_TITLES = ("network", "its batch", "ours", "most", "ours, nothing recomputed", "ours over its", "note")
POINT_TITLES = (
    "network", "baseline", "eager", "no plan", "its peak", "its time", "ours at its peak", "bound", "ours at its time",
    "our lowest", "note",
)  # fmt: skip


def tables(rows: Sequence[Row]) -> list[Table]:
    """Of the rows of one source: largest batches, then points."""
    batches = [row for row in rows if isinstance(row, BatchRow)]
    points = [row for row in rows if isinstance(row, PointRow)]
    found: list[Table] = []
    if batches:
        found.append((BATCH_TITLES, [_batch_cells(row) for row in batches]))
    if points:
        found.append((POINT_TITLES, [_point_cells(row) for row in points]))
    return found


def _batch_cells(row: BatchRow) -> list[str]:
    return [
        row.network,
        str(row.published_batch),
        str(row.batch),
        str(row.most),
        str(row.baseline_batch),
        f"{row.batch / row.published_batch:.2f}",
        _note(row),
    ]


def _point_cells(row: PointRow) -> list[str]:
    unit, nbytes = SOURCES[row.source].unit

    def part(count: int | None) -> str:
        return "-" if count is None else f"{count / row.baseline_bytes:.2f}"

    return [
        row.network,
        f"{row.baseline_bytes / nbytes:.2f} {unit}",
        part(row.eager_bytes),
        part(row.fastest_bytes),
        part(row.published_bytes),
        "not found" if row.published_extra is None else f"{row.published_extra:+.1%}",
        "-" if row.extra is None else f"{row.extra:+.1%}",
        "-" if row.bound is None else f"{row.bound:+.1%}",
        part(row.bytes_at_its_time),
        part(row.floor_bytes),
        _note(row),
    ]


def _note(row: BatchRow | PointRow) -> str:
    return "; ".join(filter(None, (row.verdict, row.remark)))


def summary(rows: Sequence[Row]) -> str:
    """Text on the rows of one source: number of matched points, by how much, and results that could not be rebuilt."""
    lines = [*_batch_lines([r for r in rows if isinstance(r, BatchRow)])]
    lines += _point_lines([r for r in rows if isinstance(r, PointRow)])
    source = next((row.source for row in rows), None)
    return "\n".join([*lines, *(f"not rebuilt: {text}" for text in (SOURCES[source].missing if source else ()))])


def _batch_lines(rows: Sequence[BatchRow]) -> list[str]:
    if not rows:
        return []
    worse = [f"{row.network} {row.verdict}" for row in rows if row.verdict]
    return [
        f"largest batches: {len(rows)}; ours is smaller on {len(worse)}" + (f" ({', '.join(worse)})" if worse else "")
    ]


def _point_lines(rows: Sequence[PointRow]) -> list[str]:
    if not rows:
        return []
    compared = [row for row in rows if row.is_comparable]
    worse = [row for row in compared if row.verdict]
    if SOURCES[rows[0].source].is_range:
        lines = [f"points at which ours is inside the reported range: {len(compared) - len(worse)} of {len(compared)}"]
    else:
        lines = [f"points that can be compared in time: {len(compared)} of {len(rows)}; ours is worse on {len(worse)}"]
    ratios = [row.bytes_at_its_time / row.published_bytes for row in compared if row.bytes_at_its_time]
    if ratios:
        lines.append(
            f"our peak at the published time over the published one: geometric mean {geometric_mean(ratios):.2f}"
        )
    gaps = [row.extra - row.bound for row in rows if row.extra is not None and row.bound is not None]
    if gaps:
        lines.append(
            f"ours above its proven bound: median {percent(median(gaps))} of the step, worst {percent(max(gaps))}"
        )
    return lines


def misses(rows: Sequence[Row]) -> list[Row]:
    """Rows that can be compared and where ours is worse."""
    compared = [row for row in rows if isinstance(row, BatchRow) or (isinstance(row, PointRow) and row.is_comparable)]
    return [row for row in compared if row.verdict and not SOURCES[row.source].is_range]


def frontiers(rows: Sequence[Row]) -> dict[tuple[str, str], FrontierRow]:
    """For the pictures, by source and network."""
    return {(row.source, row.network): row for row in rows if isinstance(row, FrontierRow)}
