"""The time of collectives, and the part that kernels hide, checked against figures worked out by hand."""

from __future__ import annotations

import pytest

from compile_remat.forecast.mesh.communication import Work, step_time_ns


@pytest.mark.parametrize(
    ("work", "time_ns"),
    [
        ([Work(10, 20)], 30),
        ([Work(10, 20, 5, 0, 7)], 42),  # gathered before, reduced behind
        ([Work(10, 20, 5, 5, 7)], 47),
        # The second gather runs beside the first forward; the second block needs none before its backward.
        ([Work(10, 20, 5, 5), Work(10, 20, 5, 0)], 65),
        ([Work(10, 20, 5, 5), Work(10, 20, 30, 0)], 85),  # longer than the forward beside it
        # Gathered ahead of the reduction, which runs beside the next backward; the last one is behind everything.
        ([Work(10, 20, 0, 5, 7), Work(10, 20, 0, 0, 7)], 67),
        ([Work(10, 20, 0, 0, 7), Work(10, 20, 0, 0, 50)], 10 + 10 + 20 + 50 + 7),  # a network that is never idle
    ],
)
def test_collectives_run_beside_kernels(work: list[Work], time_ns: int) -> None:
    assert step_time_ns(work) == time_ns
