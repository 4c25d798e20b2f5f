"""One row of table A, and the rules that say whether it keeps what we promise. Torch-free.

Rules for our rows (budgets are bytes, peaks are measured):

- at a fraction of plain torch.compile's peak: measured <= budget; the plan is within 2 % of the step's estimated time
  of its lower bound; and at least 90 % of the budget is in use unless no time is left to be won;
- a smaller budget never gives a higher peak;
- `BudgetError` is right only below `min`'s measured peak, and its floor lies within 5 % of that peak;
- `max` takes at most 1.001 of plain's peak; `min` at full size on CPU takes no more than the known limit of its model;
- planning takes no longer than torch's own partitioner on the same graph at its budget 0.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

MIB = 1 << 20
MIN_LIMIT_BYTES = {"gpt": 76 * MIB, "chain256": 46 * MIB}
GAP_LIMIT = 0.02
USE_LIMIT = 0.9
MAX_PEAK_RATIO = 1.001
FLOOR_TOLERANCE = 0.05


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


def judge(rows: Sequence[Row], *, full_size_cpu: bool) -> list[Row]:
    """The rows of one model with their verdicts; the absolute limits of `min` hold at full size on CPU only."""
    return [replace(row, verdict=_verdict(row, rows, full_size_cpu)) for row in rows]


def _verdict(row: Row, rows: Sequence[Row], full_size_cpu: bool) -> str:
    if row.failure is not None:
        return f"miss: {row.failure}"
    if row.kind != "remat":
        return ""
    reasons = _error_reasons(row, rows) if row.floor_bytes is not None else _plan_reasons(row, rows, full_size_cpu)
    return "miss: " + "; ".join(reasons) if reasons else "ok"


def _error_reasons(row: Row, rows: Sequence[Row]) -> list[str]:
    assert row.floor_bytes is not None
    lowest = lowest_peak(rows)
    if lowest is None:
        return ["no measured peak of min to judge the floor by"]
    reasons = []
    if row.budget_bytes is None or row.budget_bytes >= lowest:
        reasons.append(f"BudgetError although min reaches {lowest / MIB:.1f} MiB")
    if abs(row.floor_bytes / lowest - 1.0) > FLOOR_TOLERANCE:
        reasons.append(f"floor off by more than {FLOOR_TOLERANCE:.0%}")
    return reasons


def _plan_reasons(row: Row, rows: Sequence[Row], full_size_cpu: bool) -> list[str]:
    assert row.peak_bytes is not None
    reasons = []
    if row.budget_bytes is not None:
        reasons += _budget_reasons(row)
    higher = [other for other in _larger_budgets(row, rows) if other.peak_bytes is not None]
    if any(row.peak_bytes > (other.peak_bytes or 0) for other in higher):
        reasons.append("peak rises as the budget falls")
    plain = next((other.peak_bytes for other in rows if other.kind == "plain"), None)
    if row.setting == "max" and plain and row.peak_bytes > MAX_PEAK_RATIO * plain:
        reasons.append(f"peak {row.peak_bytes / plain:.4f} of plain")
    limit = MIN_LIMIT_BYTES.get(row.model)
    if row.setting == "min" and full_size_cpu and limit is not None and row.peak_bytes > limit:
        reasons.append(f"above {limit / MIB:.0f} MiB")
    torch_ns = torch_partitioner_ns(rows)
    if row.planning_ns is not None and torch_ns is not None and row.planning_ns > torch_ns:
        reasons.append("planning slower than torch's partitioner")
    return reasons


def _budget_reasons(row: Row) -> list[str]:
    assert row.use is not None
    reasons = []
    if row.use > 1.0:
        reasons.append("over budget")
    if row.use < USE_LIMIT and row.extra_ns is not None and row.extra_ns > 0:
        reasons.append(f"uses {row.use:.0%} with recompute left to avoid")
    if row.gap is not None and row.gap > GAP_LIMIT:
        reasons.append(f"gap above {GAP_LIMIT:.0%}")
    return reasons


def _larger_budgets(row: Row, rows: Sequence[Row]) -> list[Row]:
    """Our rows that were allowed more: `max` is above every number, `min` below."""
    return [other for other in rows if other.kind == "remat" and _rank(other) > _rank(row)]


def _rank(row: Row) -> float:
    if row.setting == "max":
        return float("inf")
    return float("-inf") if row.budget_bytes is None else float(row.budget_bytes)


def lowest_peak(rows: Sequence[Row]) -> int | None:
    return next((row.peak_bytes for row in rows if row.kind == "remat" and row.setting == "min"), None)


def torch_partitioner_ns(rows: Sequence[Row]) -> float | None:
    return next((row.planning_ns for row in rows if row.kind == "torch" and row.setting == "0.5"), None)
