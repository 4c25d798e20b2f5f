"""Time on a CUDA device, by events on its stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


def elapsed_ns(run: Callable[[], object], device: torch.device, before: Callable[[], object]) -> int:
    """Nanoseconds that the device spends on what `run` launches; waits for it.

    Args:
        before: Launches something long first: `run`'s launches queue up behind it, so that the host's time does not show.
    """
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        run()
        end.record()
        end.synchronize()
    return int(start.elapsed_time(end) * 1e6)  # milliseconds
