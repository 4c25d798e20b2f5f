"""What a page shows of one plan, as plain data: bytes are ints, times are nanoseconds, and nothing is formatted yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

PREDICTED = "predicted peak"
"""The name of the plan's own peak among `PageFigures.peaks`."""


class Kind(StrEnum):
    """What live bytes are for, in the order in which a chart stacks them, from below."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    SAVED = "saved"
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class Tensor:
    """One buffer of a step.

    Attributes:
        begin, end: The first and the last column of the chart in which it is live.
        dtype: Without "torch.".
        fate: What happens to it, as in "saved for the backward".
    """

    name: str
    nbytes: int
    kind: Kind
    begin: int
    end: int
    fate: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    module_path: str = ""
    source_line: str = ""


@dataclass(frozen=True)
class Curve:
    """Live bytes of another plan in the columns of this one."""

    label: str
    live_bytes: tuple[int, ...]


@dataclass(frozen=True)
class StepFigures:
    """Live bytes over one training step: a column for each node that runs, in order.

    Attributes:
        columns: Names of the nodes.
        num_forward: How many of them are the forward's.
        areas: Live bytes of each kind, column by column; their sum is the live bytes of the plan.
        tensors: The buffers, each one part of one area.  What the areas hold beyond them is workspace of kernels.
        times_ns: The estimated time of each node.
        other: What the plan is compared with; None where there is nothing.
    """

    columns: tuple[str, ...]
    num_forward: int
    areas: dict[Kind, tuple[int, ...]]
    tensors: tuple[Tensor, ...]
    times_ns: tuple[int, ...]
    other: Curve | None = None

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Live bytes of the plan in each column."""
        return tuple(map(sum, zip(*self.areas.values(), strict=True)))

    @property
    def starts_ns(self) -> tuple[int, ...]:
        """When each node begins, where they run one after another."""
        return tuple(accumulate(self.times_ns, initial=0))[:-1]


PLAIN, FASTEST = "plain torch.compile", "the fastest plan"


@dataclass(frozen=True)
class BaseStep:
    """The step that extra times are measured from: that of plain torch.compile's own plan, or where that is not known, the fastest.

    Attributes:
        name: `PLAIN` or `FASTEST`.
    """

    time_ns: int
    name: str = FASTEST

    def share_of(self, time_ns: int) -> float:
        """The extra time of a step as a share of this one's time; below 0 where it is faster."""
        return (time_ns - self.time_ns) / max(1, self.time_ns)


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of the frontier; `time_ns` is the estimated time of its step."""

    peak_bytes: int
    time_ns: int
    is_chosen: bool = False


@dataclass(frozen=True)
class ModuleRow:
    """What a plan does with the values of one module, or of several equal ones together.

    Attributes:
        path: The module's, where there are several with a range of numbers, as in ``layers.0-11.mlp``; empty for values of no
            module.
        modules: How many modules these are; the figures below are sums over all of them.
        num_saved, num_recomputed: How many values.
        recomputed_bytes: Bytes of the values that are computed again instead of being saved.
        recompute_time_ns: Estimated time of that.
    """

    path: str
    modules: int
    num_saved: int
    saved_bytes: int
    num_recomputed: int
    recomputed_bytes: int
    recompute_time_ns: int


class PictureSource(Protocol):
    """Works out what there is to see of a plan; a plan carries it, and asks it only when somebody looks."""

    def to_text(self) -> str:
        """Everything that it knows, for a file."""

    def step(self, plan: Any) -> StepFigures:
        """Live bytes over the step."""

    def modules(self, plan: Any) -> tuple[ModuleRow, ...]:
        """What happens in each module, the largest first."""

    def frontier(self, plan: Any, points: int) -> tuple[FrontierPoint, ...]:
        """Plans from the fastest to the one of lowest peak, this one among them; takes a search of some seconds."""

    def plans(self, points: int) -> Sequence[Any]:
        """The plans of the frontier themselves."""


@dataclass(frozen=True)
class PageFigures:
    """All that a page shows.

    Attributes:
        title: What was planned.
        summary: One sentence: what the plan comes to.
        peaks: Names with bytes, to be compared on one scale.
        budget_bytes: None where no number of bytes was asked for.
        floor_bytes: The lowest reachable peak; None where it is not known.
        base: What extra times are measured from.
        facts: Names with texts.
        notes: Sentences that a reader should see first.
    """

    title: str
    summary: str
    peaks: tuple[tuple[str, int], ...] = ()
    budget_bytes: int | None = None
    floor_bytes: int | None = None
    base: BaseStep = BaseStep(0)
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    step: StepFigures | None = None
    modules: tuple[ModuleRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()

    def known_step(self) -> StepFigures:
        """`step`; ValueError where there is none."""
        if self.step is None:
            raise ValueError("this plan was read from JSON, its tensors are not known: plan again to see them")
        return self.step
