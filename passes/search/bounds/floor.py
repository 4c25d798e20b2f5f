"""A lower bound of the lowest peak: what lives at some place of the step in every plan, however often it computes a value.

In the forward that is what the next kernels read.  While a step of the backward runs it is outputs, gradients and temporaries,
what the step reads, and what must be saved and is still to be read.
"""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.search.bounds.lp_bound import bytes_of, gradient_bytes, last_steps, read_spans


def least_peak_bytes(simulator: Simulator, pinned: Bools) -> int:
    """No plan has a lower peak.

    Args:
        pinned: What every plan saves, if the backward reads it, [values].
    """
    in_forward = int(simulator.forward.tops.max(initial=0))
    if not simulator.num_steps:
        return in_forward
    spans = read_spans(simulator)
    live = gradient_bytes(simulator) + bytes_of(spans, simulator)
    last = last_steps(simulator)
    for v in np.flatnonzero(pinned & (simulator.saved_nbytes > 0) & (last >= 0)).tolist():
        waits = np.arange(simulator.num_steps) <= last[v]
        for first, end in zip(spans.first[spans.values == v], spans.last[spans.values == v], strict=True):
            waits[first : end + 1] = False  # counted there
        live += waits * simulator.saved_nbytes[v]
    return max(in_forward, int(live.max(initial=0)))
