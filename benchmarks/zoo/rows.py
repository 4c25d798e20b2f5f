"""One row for each model and setting, and the file of such rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.row_store import Store

PLAIN = "plain"
SETTINGS = ("min", "max", "0.6", "0.4")
"""Settings, in the order in which their rows are made."""
ADVICE = "advice"
"""A budget that no plan fits, and then the budget that its error asks for; such rows are made only on request."""
OK, FLOOR, FAILED, TIMEOUT, STALLED = "ok", "floor", "failed", "timeout", "stalled"

Bytes = tuple[int | None, ...]


@dataclass(frozen=True)
class ZooRow:
    """One model under one setting; tuples have an entry for each graph that has a backward.

    Attributes:
        setting: ``plain`` for plain torch.compile, `ADVICE`, or a budget; a fraction stands for bytes, that share of the
            largest graph's peak under plain torch.compile.
        budget_bytes: The budget of each graph; under `ADVICE`, the bytes that the error asked for.
        graphs: The number of graphs that have a backward.
        predicted_bytes: Peaks by the plans that were kept.
        observed_bytes: Peaks read of Inductor before any code was emitted; empty if none were read.
        emitted_bytes: Peaks of the code that was emitted last, by a dry run.
        rounds: Number of times each graph was planned and its code emitted.
        floor_bytes: `floor_bytes` of the BudgetError that was raised.
        extra_ns, step_ns: Predicted times of the kept plans, over all graphs: beyond the fastest plan, and of the whole step.
        gradient_bytes: Bytes of the parameters that have a gradient.
        planning_cpu_s: CPU seconds from the joint graphs to two modules each, over all rounds.
        cpu_s, wall_s: CPU and wall time of tracing, planning and compiling; importing libraries and building the model is left out.
        outcome: One of `OK`, `FLOOR`, `FAILED`, `TIMEOUT`, `STALLED`: the last where the machine was busy, or the process paused.
        statuses: Statuses of the plans.
        warnings: Texts of our warnings, each once.
        failure: The innermost error, or how the process ended, or why the dry run does not follow the code.
        measured_bytes: The peak of a second training step (``--real``).
        gradient_error: The largest difference of a parameter's gradient from that of `reference`, over its largest value.
        reference: ``eager``, or ``plain`` for a model that draws random numbers, which eager mode draws otherwise.
        sources: Hash of the product's sources, 12 digits.
        torch: Version of torch.
    """

    model: str
    library: str
    family: str
    setting: str
    dtype: str = "float32"
    is_real: bool = False
    budget_bytes: int | None = None
    graphs: int | None = None
    predicted_bytes: Bytes = ()
    observed_bytes: Bytes = ()
    emitted_bytes: Bytes = ()
    rounds: tuple[int, ...] = ()
    floor_bytes: int | None = None
    extra_ns: float | None = None
    step_ns: float | None = None
    gradient_bytes: int | None = None
    planning_cpu_s: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    outcome: str = OK
    statuses: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: str = ""
    measured_bytes: int | None = None
    gradient_error: float | None = None
    reference: str = ""
    sources: str = ""
    torch: str = ""

    @staticmethod
    def of(stored: dict[str, Any]) -> "ZooRow":
        """A row of its stored fields."""
        return ZooRow(**{name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()})

    @property
    def run(self) -> tuple[str, str, str, bool]:
        """The key of the row: a new row replaces one with the same key."""
        return self.model, self.setting, self.dtype, self.is_real

    @property
    def errors(self) -> list[float]:
        """Predicted over emitted peak, less 1, of each graph where both are known."""
        pairs = zip(self.predicted_bytes, self.emitted_bytes, strict=False)
        return [predicted / emitted - 1 for predicted, emitted in pairs if predicted and emitted]

    @property
    def error(self) -> float | None:
        """The error of the graph with the largest one."""
        return max(self.errors, key=abs, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Peak of the graph whose emitted code has the highest peak."""
        return max((each for each in self.emitted_bytes if each is not None), default=None)

    @property
    def is_over(self) -> bool:
        """True if a peak is above the budget: the measured peak, if there is one."""
        peak_bytes = self.measured_bytes or self.peak_bytes
        return self.budget_bytes is not None and peak_bytes is not None and peak_bytes > self.budget_bytes


def is_kept(row: ZooRow | None, *, sources: str, torch: str, fresh: bool) -> bool:
    """True for a stored row that need not be made again: one of the same torch, under `fresh` one of the same sources.

    Plain torch.compile has no part in our sources.  A row that stalled is made again.
    """
    if row is None or row.torch != torch or row.outcome == STALLED:
        return False
    return not fresh or row.setting == PLAIN or row.sources == sources


def store_of(path: Path | None, head: dict[str, str]) -> Store[ZooRow]:
    """The rows of a file."""
    return Store(path, head, ZooRow.of, lambda row: row.run)


def plain_of(row: ZooRow, rows: Sequence[ZooRow]) -> ZooRow | None:
    """The row of plain torch.compile that goes with a row."""
    return next((known for known in rows if known.run == (row.model, PLAIN, row.dtype, row.is_real)), None)
