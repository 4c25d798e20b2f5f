"""A lower bound of the lowest peak: bytes live at some place in every plan, however often the plan recomputes a value.

In the forward, these bytes are the buffers that later kernels read.  While a step of the backward runs, these bytes are outputs,
gradients, temporaries, the values that the step reads, and values that must be saved and are still to be read.
"""

from __future__ import annotations

import numpy as np

from compile_remat.passes.memory.simulator import Bools, Simulator
from compile_remat.passes.search.bounds.lp_bound import bytes_of, gradient_bytes, last_steps, read_spans


def least_peak_bytes(simulator: Simulator, pinned: Bools) -> int:
    """Bytes that the peak of no plan goes below.

    Args:
        pinned: Mask of the values that every plan saves if the backward reads them, [values].
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
            waits[first : end + 1] = False  # `spans` count these steps
        live += waits * simulator.saved_nbytes[v]
    return max(in_forward, int(live.max(initial=0)))
