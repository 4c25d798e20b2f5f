"""One row of what was measured of a model.  Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One compiled configuration. `kind` is plain, torch (its activation_memory_budget) or remat.

    `floor_bytes` is set where the answer was a BudgetError, `failure` where it was any other exception.
    """

    model: str
    kind: str
    setting: str
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    requested_bytes: int | None = None
    gradient_bytes: int | None = None
    step_ns: int | None = None
    first_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    scheduled_peak_bytes: int | None = None
    recompute_ns: float | None = None
    extra_ns: float | None = None
    gap: float | None = None
    planning_ns: float | None = None
    status: str | None = None
    floor_bytes: int | None = None
    failure: str | None = None
    verdict: str = ""

    @property
    def use(self) -> float | None:
        if self.peak_bytes is None or self.budget_bytes is None:
            return None
        return self.peak_bytes / self.budget_bytes

    @property
    def prediction_error(self) -> float | None:
        """Positive where the measured peak is above the predicted one."""
        if self.peak_bytes is None or not self.predicted_peak_bytes:
            return None
        return self.peak_bytes / self.predicted_peak_bytes - 1.0


def lowest_peak(rows: Sequence[Row]) -> int | None:
    """The measured peak at `min`, or that of its emitted code where nothing was measured."""
    lowest = next((row for row in rows if row.kind == "remat" and row.setting == "min"), None)
    return None if lowest is None else lowest.peak_bytes or lowest.scheduled_peak_bytes
