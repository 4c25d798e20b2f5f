"""The fastest path of segments whose peaks fit: resource-constrained shortest path by label setting.

Labels are (cut, saved bytes so far) with exact bytes.  The result is the fastest path as long as no cut has more labels than
are kept; beyond that the labels are thinned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.buffers import Ints
from compile_remat.passes.search.options import DEFAULT


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
    def key(self) -> tuple[int, int, int]:
        return self.first, self.last, self.level


SegmentTable = Mapping[tuple[int, int, int], Option]
"""Options by first bound, last bound and level."""


def fastest_path(
    known: SegmentTable,
    last_bound: int,
    budget_bytes: int,
    max_labels: int = DEFAULT.segment_labels,
) -> list[Option] | None:
    """The fastest row of options from bound 0 to the last one whose predicted peak fits; None if there is none.

    Args:
        max_labels: Labels (prefix bytes, time) kept per cut, spread evenly over the bytes.
    """
    into: dict[int, list[Option]] = defaultdict(list)
    for key in sorted(known):
        into[key[1]].append(known[key])
    start = np.zeros(1, dtype=np.int64)
    labels = {0: _Labels(start, start, (), start, start)}
    for node in range(1, last_bound + 1):
        found = _extend(into[node], labels, budget_bytes, max_labels)
        if found is not None:
            labels[node] = found
    if last_bound not in labels:
        return None
    index, node = int(np.argmin(labels[last_bound].times)), last_bound
    row = []
    while node:
        option, index = labels[node].before(index)
        row.append(option)
        node = option.first
    return row[::-1]


@dataclass(frozen=True)
class _Labels:
    """Ways to reach one cut, by their bytes, ascending.

    Attributes:
        nbytes, times: Saved bytes and time up to the cut, [L].
        options: That end here.
        owners, parents: The option that each label ends with, and the label at its begin, [L].
    """

    nbytes: Ints
    times: Ints
    options: Sequence[Option]
    owners: Ints
    parents: Ints

    def before(self, index: int) -> tuple[Option, int]:
        """The option that a label ends with, and the number of the label that it begins at."""
        return self.options[self.owners[index]], int(self.parents[index])


def _extend(
    options: Sequence[Option], labels: dict[int, _Labels], budget_bytes: int, max_labels: int
) -> _Labels | None:
    """Labels at one cut from all options that end there: Pareto in (bytes, time), thinned evenly over the bytes.

    Options that begin at the same cut stand side by side and take its labels together.
    """
    all_bytes, all_times, owner, parent = [], [], [], []
    begin = 0
    while begin < len(options):
        first, end = options[begin].first, begin
        while end < len(options) and options[end].first == first:
            end += 1
        if first in labels:
            known, here = labels[first], options[begin:end]
            local = np.array([o.local_peak_bytes for o in here], dtype=np.int64)
            fits = known.nbytes[None, :] + local[:, None] <= budget_bytes
            which, label = np.nonzero(fits)
            charge, time_ns = np.array([(o.charge_bytes, o.time_ns) for o in here], dtype=np.int64).T
            all_bytes.append(known.nbytes[label] + charge[which])
            all_times.append(known.times[label] + time_ns[which])
            owner.append(which + begin)
            parent.append(label)
        begin = end
    if not sum(map(len, all_bytes)):
        return None
    nbytes, times = np.concatenate(all_bytes), np.concatenate(all_times)
    owners, parents = np.concatenate(owner), np.concatenate(parent)
    order = np.argsort(nbytes, kind="stable")
    best = np.minimum.accumulate(times[order])
    order = order[np.concatenate([[True], best[1:] < best[:-1]])]
    order = order[np.flatnonzero(np.diff(nbytes[order], append=-1))]  # the fastest of equal bytes stands last
    if len(order) > max_labels:
        buckets = (nbytes[order] * max_labels // max(1, budget_bytes)).astype(np.int64)
        order = order[np.flatnonzero(np.diff(buckets, append=-1))]  # the fastest of each bucket stands last in it
    return _Labels(nbytes[order], times[order], options, owners[order], parents[order])
