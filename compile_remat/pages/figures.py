"""The data of a page about one plan: bytes are ints, times are nanoseconds, all unformatted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

PREDICTED = "predicted peak"
"""Name of the plan's own peak in `PageFigures.peaks`."""


class Kind(StrEnum):
    """The kinds of live bytes, in the order in which a chart stacks them, from below."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    SAVED = "saved"
    RECOMPUTED = "recomputed"
    TEMPORARY = "temporary"


COLOURS = {
    Kind.OUTPUT: "#9c4f96",
    Kind.GRADIENT: "#3a9d5d",
    Kind.SAVED: "#2b6cd0",
    Kind.RECOMPUTED: "#d9730d",
    Kind.TEMPORARY: "#8f949c",
}
"""One set of colours for light and dark grounds.

Each colour has a contrast of at least 3 to 1 to white and to near-black (WCAG 2.2, 1.4.11), and any two are at least 20 apart in
CIELAB (CIE76), for people with normal sight and with protanopia, deuteranopia or tritanopia (Machado et al. 2009, severity 1).
"""

BEYOND = 1.5
"""A limit above this multiple of all peaks is named without being drawn to scale: the peaks would be too small to compare."""

HATCHES = {
    Kind.OUTPUT: "M0 0L8 8M8 0L0 8",
    Kind.GRADIENT: "M0 4H8",
    Kind.SAVED: "",
    Kind.RECOMPUTED: "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    Kind.TEMPORARY: "M4 0V8",
}
"""White lines over the colour, in a square of 8 by 8 pixels: kinds are told apart in grey, too."""


@dataclass(frozen=True)
class Tensor:
    """One buffer of a step.

    Attributes:
        begin, end: The first and the last column of the chart in which the buffer is live.
        dtype: Name of the dtype without "torch.".
        fate: The plan's treatment of the buffer in words, such as "saved for the backward".
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
        num_forward: Number of columns that are the forward's.
        areas: Live bytes of each kind, column by column; the sum over kinds is the live bytes of the plan.
        tensors: The buffers, each a part of one area.  Bytes of the areas beyond the buffers are workspaces of kernels.
        times_ns: The estimated time of each node.
        other: The curve of the plan to compare with; None if there is none.
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
        """Start time of each node, in nanoseconds, if the nodes run one after another."""
        return tuple(accumulate(self.times_ns, initial=0))[:-1]


PLAIN, FASTEST = "plain torch.compile", "the fastest plan"


@dataclass(frozen=True)
class BaseStep:
    """The step that extra times are relative to: the one of plain torch.compile's own plan, or if unknown, of the fastest plan.

    Attributes:
        name: `PLAIN` or `FASTEST`.
    """

    time_ns: int
    name: str = FASTEST

    def share_of(self, time_ns: int) -> float:
        """Returns the extra time of a step as a share of this step's time; below 0 if that step is faster."""
        return (time_ns - self.time_ns) / max(1, self.time_ns)


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of the frontier; `time_ns` is the estimated time of its step.

    Attributes:
        moves_nothing: True for a point of a second curve, of plans that move nothing to the host where others may.
    """

    peak_bytes: int
    time_ns: int
    is_chosen: bool = False
    moves_nothing: bool = False


@dataclass(frozen=True)
class ModuleRow:
    """Saved and recomputed values of one module, or of several equal modules together.

    Attributes:
        path: Path of the module; for several modules with a range of numbers, as in ``layers.0-11.mlp``; empty for values outside
            of modules.
        modules: Number of these modules; the figures below are sums over all of them.
        num_saved, num_recomputed: Numbers of values that are saved and recomputed.
        recomputed_bytes: Bytes of the values that are recomputed instead of saved.
        recompute_time_ns: Estimated time of the recomputation.
    """

    path: str
    modules: int
    num_saved: int
    saved_bytes: int
    num_recomputed: int
    recomputed_bytes: int
    recompute_time_ns: int


class PictureSource(Protocol):
    """Computes the figures of a plan; each plan holds a source and calls it only when a figure is requested."""

    def to_text(self) -> str:
        """Returns all data of the source as text, for a file."""

    def step(self, plan: Any) -> StepFigures:
        """Returns the live bytes over the step."""

    def modules(self, plan: Any) -> tuple[ModuleRow, ...]:
        """Returns a row for each module, in the order in which the model runs them."""

    def frontier(self, plan: Any, points: int) -> tuple[FrontierPoint, ...]:
        """Returns points from the fastest plan to the one of lowest peak, this plan among them; the search takes some seconds.

        If plans may move tensors to the host, the points of those that move nothing follow, see `FrontierPoint`.
        """

    def plans(self, points: int) -> Sequence[Any]:
        """Returns the plans of the frontier."""


@dataclass(frozen=True)
class PageFigures:
    """All data of a page.

    Attributes:
        title: The title, which names the graph and the budget.
        summary: One sentence with the main figures of the plan.
        peaks: Names of peaks with their bytes, shown on one scale.
        budget_bytes: The budget; None if it is not a number of bytes.
        floor_bytes: The lowest reachable peak; None if unknown.
        base: The step that extra times are relative to.
        facts: Names of other facts with their texts.
        notes: Sentences for the top of the page.
        step: Live bytes over the step; None if unknown.
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

    @property
    def limits(self) -> dict[str, int]:
        """Bytes of the budget and of the lowest reachable peak, by name; those that are known."""
        limits = {"budget": self.budget_bytes, "lowest reachable peak": self.floor_bytes}
        return {name: nbytes for name, nbytes in limits.items() if nbytes is not None}

    def known_step(self) -> StepFigures:
        """Returns `step`; raises ValueError with the notes if it is None."""
        if self.step is None:
            notes = (*self.notes, "the tensors of this plan are not known: plan again to see them")
            raise ValueError("; ".join(note.rstrip(".") for note in notes))
        return self.step
