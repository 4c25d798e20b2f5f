"""The fastest path of segments whose peaks fit: resource-constrained shortest path by label setting.

Labels are (cut, saved bytes so far) with exact bytes.  The result is the fastest path as long as no cut has more labels than
the limit; beyond the limit, the labels are thinned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.search.options import DEFAULT

BOUND_STRIDE = 1 << 48
"""Distance between bounds in the keys by which labels are looked up: more than any number of bytes."""

Key = tuple[int, int, int]
"""First bound, last bound and level of an option."""


@dataclass(frozen=True)
class Option:
    """One way to run the segment between two cuts."""

    first: int
    last: int
    level: int
    charge_bytes: int
    time_ns: int
    local_peak_bytes: int

    @property
    def key(self) -> Key:
        return self.first, self.last, self.level


class SegmentTable:
    """Options by last bound, first bound and level, ascending.

    Attributes:
        options: The option of each row.
        rows: Maps the key of each option to its row.
        firsts, charges, times, local_peaks: Fields of the options as columns, [rows].
        ends: For each last bound, the row after its last option.
    """

    def __init__(self, options: Iterable[Option]) -> None:
        self.options = sorted(options, key=lambda o: (o.last, o.first, o.level))
        self.rows = {o.key: row for row, o in enumerate(self.options)}
        cells = [(o.first, o.last, o.charge_bytes, o.time_ns, o.local_peak_bytes) for o in self.options]
        columns = np.array(cells, dtype=np.int64).reshape(-1, 5).T.copy()
        self.firsts, lasts, self.charges, self.times, self.local_peaks = columns
        self.ends = np.searchsorted(lasts, np.arange(lasts.max(initial=0) + 1), side="right").tolist()

    def corrected(self, changes: Mapping[Key, Option]) -> SegmentTable:
        """Returns a copy of the table with the sizes in `changes` for some of its options."""
        found = copy.copy(self)
        found.options, found.charges, found.local_peaks = self.options[:], self.charges.copy(), self.local_peaks.copy()
        for key, option in changes.items():
            row = self.rows[key]
            found.options[row], found.charges[row] = option, option.charge_bytes
            found.local_peaks[row] = option.local_peak_bytes
        return found

    def into(self, bound: int) -> slice:
        """The rows of the options that end at a bound, from 1."""
        return slice(self.ends[bound - 1], self.ends[bound]) if bound < len(self.ends) else slice(0, 0)


def fastest_path(
    table: SegmentTable,
    last_bound: int,
    budget_bytes: int,
    max_labels: int = DEFAULT.segment_labels,
) -> list[Option] | None:
    """The fastest path of options from bound 0 to `last_bound` whose predicted peak fits the budget; None if there is none.

    Args:
        max_labels: Labels (prefix bytes, time) kept per cut, spread evenly over the bytes.
    """
    labels = _Labels(last_bound, budget_bytes, max_labels)
    for bound in range(1, last_bound + 1):
        labels.extend(table, bound)
    label = labels.fastest_at(last_bound)
    if label is None:
        return None
    row = []
    while label:
        row.append(table.options[labels.owners[label]])
        label = int(labels.parents[label])
    return row[::-1]


class _Labels:
    """Labels: ways to reach the cuts, sorted by bound and then by bytes; the first label is that of bound 0.

    Attributes:
        nbytes, times: Saved bytes and time up to the cut, [L].
        owners, parents: The row of the label's last option, and the label at which that option begins, [L].
        begins: Position at which the labels of each bound begin, [bounds + 1].
    """

    def __init__(self, last_bound: int, budget_bytes: int, max_labels: int) -> None:
        self.budget_bytes, self.max_labels = budget_bytes, max_labels
        self.nbytes = self.times = self.owners = self.parents = self._keys = np.zeros(1, dtype=np.int64)
        self.begins = np.ones(last_bound + 2, dtype=np.int64)
        self.begins[0] = 0

    def extend(self, table: SegmentTable, bound: int) -> None:
        """Adds the labels of all options that end at one bound: Pareto in (bytes, time), thinned evenly over the bytes."""
        rows = table.into(bound)
        firsts = table.firsts[rows]
        begins = self.begins[firsts]
        room = firsts * BOUND_STRIDE + (self.budget_bytes - table.local_peaks[rows])
        counts = np.maximum(
            np.searchsorted(self._keys, room, side="right") - begins, 0
        )  # the labels of the first bound that each option fits behind
        which = np.repeat(np.arange(len(counts)), counts)
        if not len(which):
            return
        parents = np.arange(len(which)) + (begins - np.cumsum(counts) + counts)[which]
        owners = which + rows.start
        nbytes, times = self.nbytes[parents] + table.charges[owners], self.times[parents] + table.times[owners]
        order = np.argsort(nbytes, kind="stable")
        best = np.minimum.accumulate(times[order])
        order = order[np.concatenate([[True], best[1:] < best[:-1]])]
        order = order[np.flatnonzero(np.diff(nbytes[order], append=-1))]  # the fastest of equal bytes stands last
        if len(order) > self.max_labels:
            buckets = nbytes[order] * self.max_labels // max(1, self.budget_bytes)
            order = order[np.flatnonzero(np.diff(buckets, append=-1))]  # the fastest of each bucket stands last in it
        self.nbytes = np.concatenate([self.nbytes, nbytes[order]])
        self.times = np.concatenate([self.times, times[order]])
        self.owners = np.concatenate([self.owners, owners[order]])
        self.parents = np.concatenate([self.parents, parents[order]])
        self._keys = np.concatenate([self._keys, nbytes[order] + bound * BOUND_STRIDE])
        self.begins[bound + 1 :] = len(self.nbytes)

    def fastest_at(self, bound: int) -> int | None:
        """Position of the fastest label of a bound; None if the bound has none."""
        begin, end = self.begins[bound : bound + 2].tolist()
        return None if begin == end else begin + int(np.argmin(self.times[begin:end]))
