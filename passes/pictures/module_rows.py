"""The values that a plan saves and recomputes, counted by module; equal layers share one row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from compile_remat.pages.figures import ModuleRow
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.problem.duplication import SUFFIX

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a part of a module's path that is a number, as in ``layers.3.mlp``."""


def rows_of_modules(found: Candidate) -> tuple[ModuleRow, ...]:
    """One row for each module that has a saved or a recomputed value, most bytes first.

    Modules whose paths differ in one number alone, and whose counts and bytes are equal, share a row.
    """
    values, simulator, batch = found.simulator.problem.values, found.simulator, found.batch
    rows: dict[str, ModuleRow] = {}
    for v in np.flatnonzero(batch.used[:, 0] | batch.recomputed[:, 0]).tolist():
        value = values[v]
        path = value.origin.module_path
        row = rows.get(path) or ModuleRow(path, 1, 0, 0, 0, 0, 0)
        if batch.used[v, 0]:
            row = replace(
                row, num_saved=row.num_saved + 1, saved_bytes=row.saved_bytes + int(simulator.saved_nbytes[v])
            )
        if batch.recomputed[v, 0]:
            row = replace(row, recompute_time_ns=row.recompute_time_ns + value.time_ns)
            if not value.name.endswith(SUFFIX) or not batch.recomputed[v - 1, 0]:
                row = replace(
                    row, num_recomputed=row.num_recomputed + 1, recomputed_bytes=row.recomputed_bytes + value.nbytes
                )
        rows[path] = row
    return tuple(sorted(folded(rows.values()), key=_size, reverse=True))


def _size(row: ModuleRow) -> tuple[int, int, str]:
    return row.saved_bytes + row.recomputed_bytes, row.recompute_time_ns, row.path


def folded(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    """Merges rows of numbered modules with equal counts and bytes: ``layers.0-2.mlp``, ``layers.3,7.mlp``."""
    groups: dict[tuple[object, ...], list[ModuleRow]] = {}
    for row in rows:
        pattern = NUMBER.sub("*", row.path, count=1)
        figures = (row.num_saved, row.saved_bytes, row.num_recomputed, row.recomputed_bytes)
        groups.setdefault((pattern, *figures), []).append(row)
    return [_merged(pattern, group) for (pattern, *_), group in groups.items()]


def _merged(pattern: object, group: Sequence[ModuleRow]) -> ModuleRow:
    first = group[0]
    if len(group) == 1:
        return first
    numbers = sorted(int(match[0]) for row in group if (match := NUMBER.search(row.path)))
    return ModuleRow(
        str(pattern).replace("*", ranges(numbers), 1),
        len(group),
        sum(row.num_saved for row in group),
        sum(row.saved_bytes for row in group),
        sum(row.num_recomputed for row in group),
        sum(row.recomputed_bytes for row in group),
        sum(row.recompute_time_ns for row in group),
    )


def ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers as ranges: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
