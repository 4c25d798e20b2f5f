"""The values that a plan saves and recomputes, counted by module; equal layers share one row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple

import numpy as np

from compile_remat.pages.figures import ModuleRow
from compile_remat.passes.memory.candidate_plan import Candidate
from compile_remat.passes.problem.duplication import SUFFIX

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a part of a module's path that is a number, as in ``layers.3.mlp``."""


def rows_of_modules(found: Candidate) -> tuple[ModuleRow, ...]:
    """One row for each module that has a saved or a recomputed value, in the order in which the model runs them.

    Modules whose paths differ in one number alone, and whose counts and bytes are equal, share a row.
    """
    batch, saved_nbytes = found.batch, found.simulator.saved_nbytes
    used, recomputed = batch.used[:, 0], batch.recomputed[:, 0]
    rows: dict[str, list[ModuleRow]] = {}
    for v in np.flatnonzero(used | recomputed).tolist():
        value, is_saved, runs_again = found.simulator.problem.values[v], bool(used[v]), bool(recomputed[v])
        is_first = runs_again and not (value.name.endswith(SUFFIX) and recomputed[v - 1])
        path = value.origin.module_path
        row = ModuleRow(
            path,
            modules=1,
            num_saved=int(is_saved),
            saved_bytes=int(saved_nbytes[v]) * is_saved,
            num_recomputed=int(is_first),
            recomputed_bytes=value.nbytes * is_first,
            recompute_time_ns=value.time_ns * runs_again,
        )
        rows.setdefault(path, []).append(row)
    in_modules = (_summed(path, 1, of_path) for path, of_path in rows.items())
    return tuple(folded(in_modules))


def _summed(path: str, modules: int, rows: Sequence[ModuleRow]) -> ModuleRow:
    sums = (sum(column) for column in zip(*(astuple(row)[2:] for row in rows), strict=True))
    return ModuleRow(path, modules, *sums)


def folded(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    """Merges rows of numbered modules with equal counts and bytes: ``layers.0-2.mlp``, ``layers.3,7.mlp``."""
    groups: dict[tuple[object, ...], list[ModuleRow]] = {}
    for row in rows:
        pattern = NUMBER.sub("*", row.path, count=1)
        figures = (row.num_saved, row.saved_bytes, row.num_recomputed, row.recomputed_bytes)
        groups.setdefault((pattern, *figures), []).append(row)
    return [_merged(group) for group in groups.values()]


def _merged(group: Sequence[ModuleRow]) -> ModuleRow:
    if len(group) == 1:
        return group[0]
    numbers = sorted(int(match[0]) for row in group if (match := NUMBER.search(row.path)))
    return _summed(NUMBER.sub(ranges(numbers), group[0].path, count=1), len(group), group)


def ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers as ranges: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
