"""The planner's answer, as plain data: what to save, what it costs, and how far from the best it can be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from compile_remat._util import json_values
from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import format_bytes, format_time
from compile_remat.pages.figures import PLAIN, PREDICTED, BaseStep, PageFigures, PictureSource
from compile_remat.pages.viewable import Viewable
from compile_remat.passes.problem.problem import SCHEMA

NARROWED = "narrowed"
"""A field that plan files had: the values that the plan saves in fewer bits.  Read where it names none."""


class Status(StrEnum):
    """How a plan ended; failure is data, not an exception."""

    OPTIMAL = "optimal: no plan within the budget is faster"
    FEASIBLE = "feasible: fits the budget; the gap says how much faster another plan could be at most"
    INFEASIBLE = "infeasible: no plan found fits the budget; this is the one of lowest peak"
    REPLAYED = "replayed: read from a plan file"
    FALLBACK = "fallback: torch's own choice, because the planner failed"


@dataclass(frozen=True)
class SlicedProduct:
    """A product whose rows, with all that is made of them, are computed in slices.

    Attributes:
        name: The product's node in the joint graph.
    """

    name: str
    slices: int


@dataclass(frozen=True)
class Plan(Viewable):
    """Which values to save; the rest of what the backward reads is recomputed.

    Attributes:
        problem_key: `Problem.key()` of the problem that it solves.
        budget_bytes: What it was asked to fit; None where only speed or only memory counted.
        saved: Names of the saved values that the backward reads.
        recomputed: Names of the values computed once more, or more often.
        again: Those of them that have a second copy in the backward, see `recursive`; where nothing reads the first, it is not run.
        peak_bytes: Predicted region peak: the most bytes live at once in forward and backward.
        forward_peak_bytes: The same, of the forward alone.
        saved_bytes: Bytes of saved values that the forward hands to the backward, outputs not counted.
        input_copy_bytes: Bytes of copies of inputs that it hands on with them: weights in the order of a convolution.
        output_bytes: Bytes of the outputs.
        step_time_ns: Estimated time of forward and backward with nothing recomputed, and nothing written only to be saved.
        recompute_time_ns: Estimated time of the recomputed values.
        saving_time_ns: Estimated time of the traffic of saving.
        extra_time_ns: Estimated time beyond the fastest plan of any size, which the search minimises.  People are told the time
            beyond `base`.
        bound_time_ns: Proven least `extra_time_ns` of any plan within the budget, or where none was given, within the plan's
            own peak; for a plan without `again`, of any other such plan.
        least_peak_bytes: Proven: no plan has a lower peak, whatever it recomputes and how often.
        simulations: Plans tried on the way: the deterministic measure of the planner's work.
        written: Steps that the backward's graph says are written to memory, see `Assumptions`.
        sliced: What is computed in slices of rows; the other names are those of the graph that has it so.
        plain_time_ns: Estimated time of the step under plain torch.compile's own plan; None where nobody asked for it.
        pictures: What draws it; None for a plan that was read from JSON, of which the totals alone are known.  Not in its JSON.
    """

    problem_key: str
    status: Status
    budget_bytes: int | None
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    peak_bytes: int
    forward_peak_bytes: int
    saved_bytes: int
    step_time_ns: int
    recompute_time_ns: int
    extra_time_ns: int
    bound_time_ns: int
    largest: tuple[LiveBuffer, ...] = ()
    output_bytes: int = 0
    input_copy_bytes: int = 0
    simulations: int = 0
    again: tuple[str, ...] = ()
    least_peak_bytes: int = 0
    sliced: tuple[SlicedProduct, ...] = ()
    written: tuple[str, ...] = ()
    saving_time_ns: int = 0
    plain_time_ns: int | None = field(default=None, compare=False)
    pictures: PictureSource | None = field(default=None, compare=False, repr=False)

    @property
    def held_bytes(self) -> int:
        """What lies there from the end of the forward to the backward."""
        return self.saved_bytes + self.input_copy_bytes + self.output_bytes

    @property
    def time_ns(self) -> int:
        """Estimated time of the step: that of its kernels, of what is recomputed, and of the traffic of saving."""
        return self.step_time_ns + self.recompute_time_ns + self.saving_time_ns

    @property
    def base(self) -> BaseStep:
        """The base of its extra time: plain torch.compile's own plan, or where that is not known, the fastest plan."""
        if self.plain_time_ns is None:
            return BaseStep(self.time_ns - self.extra_time_ns)
        return BaseStep(self.plain_time_ns, PLAIN)

    @property
    def extra_share(self) -> float:
        """Its extra time as a share of the `base`; below 0 where it is faster."""
        return self.base.share_of(self.time_ns)

    @property
    def bound_share(self) -> float:
        """The lower bound of that."""
        return self.base.share_of(self.time_ns - self.extra_time_ns + self.bound_time_ns)

    @property
    def gap(self) -> float:
        """Time between the plan and its lower bound, as a fraction of the step's estimated time."""
        return (self.extra_time_ns - self.bound_time_ns) / max(1, self.step_time_ns)

    @property
    def slices_text(self) -> str:
        """Which products are computed in how many slices; empty where none is."""
        return ", ".join(f"{product.name} in {product.slices}" for product in self.sliced)

    @property
    def is_feasible(self) -> bool:
        """Whether the predicted peak lies within what was asked; always, where no bytes were asked for."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        """The totals and the largest tensors at the peak, in fixed width."""
        mib = 1 << 20
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        recursive = f", {len(self.again)} of them in recursive segments" if self.again else ""
        rows = [
            ("status", self.status.value),
            ("budget", budget),
            ("predicted peak", f"{self.peak_bytes / mib:.1f} MiB (forward {self.forward_peak_bytes / mib:.1f})"),
            ("saved", f"{self.saved_bytes / mib:.1f} MiB in {len(self.saved)} tensors"),
            ("recomputed", f"{len(self.recomputed)} values{recursive}, {self._overhead_text}"),
            *self._time_rows,
        ]
        if self.sliced:
            rows.append(("slices", self.slices_text))
        if self.least_peak_bytes:
            rows.append(("peak bound", f"{self.least_peak_bytes / mib:.1f} MiB: no plan needs less"))
        lines = [f"  {name:<15} {text}" for name, text in rows]
        lines += ["  largest at the peak:"] if self.largest else []
        for b in self.largest:
            where = " ".join(x for x in (b.module_path, b.source_line) if x)
            lines.append(
                f"    {b.nbytes / mib:10.2f} MiB  {b.dtype}{list(b.shape)} {b.name} ({b.role}) {where}".rstrip()
            )
        return "\n".join(["Plan", *lines])

    @property
    def _overhead_text(self) -> str:
        """Text: time of recomputing and saving beside that of the base; the differences add up to the extra time."""
        text = f"{format_time(self.recompute_time_ns)}; saving takes {format_time(self.saving_time_ns)}"
        if self.sliced:  # its kernels are others
            return text
        return f"{text} ({self.base.name}: {format_time(self.base.time_ns - self.step_time_ns)} for both)"

    @property
    def _time_rows(self) -> list[tuple[str, str]]:
        base, bound_ns = self.base, self.time_ns - self.extra_time_ns + self.bound_time_ns
        gap = (self.time_ns - bound_ns) / max(1, base.time_ns)
        return [
            ("step", f"{format_time(self.time_ns)}, {base.name} {format_time(base.time_ns)} (estimated)"),
            ("extra time", f"{format_time(self.time_ns - base.time_ns)} ({self.extra_share:+.2%})"),
            ("lower bound", f"{format_time(bound_ns - base.time_ns)} ({self.bound_share:+.2%}), gap {gap:.2%}"),
        ]

    def figures(self, points: int = 0) -> PageFigures:
        """What a page shows of it, with a frontier of so many budgets; without `pictures` the totals alone."""
        held = f"{format_bytes(self.saved_bytes)} in {len(self.saved)} tensors"
        again = f"{len(self.recomputed)} values, {self._overhead_text}"
        facts = (
            ("status", self.status.value),
            ("saved", held),
            ("recomputed", again),
            *self._time_rows,
            *[("slices", self.slices_text)] * bool(self.sliced),
            *[("peak bound", f"{format_bytes(self.least_peak_bytes)}: no plan needs less")]
            * bool(self.least_peak_bytes),
            ("graph", self.problem_key),
        )
        bare = PageFigures(
            title="Plan",
            summary=f"Peaks at {format_bytes(self.peak_bytes)}: saves {held}, recomputes {again}.",
            peaks=((PREDICTED, self.peak_bytes),),
            budget_bytes=self.budget_bytes,
            base=self.base,
            facts=facts,
        )
        if self.pictures is None:
            return replace(
                bare, notes=("This plan was read from JSON: its tensors are not known. Plan again to see them.",)
            )
        frontier = self.pictures.frontier(self, points) if points else ()
        return replace(bare, step=self.pictures.step(self), modules=self.pictures.modules(self), frontier=frontier)

    def to_json(self) -> str:
        """The plan as JSON that a person can read and diff; `from_json` gives an equal one."""
        fields = {name: value for name, value in asdict(self).items() if name != "pictures"}
        return json.dumps({"schema": SCHEMA, **fields, "status": self.status.name}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote; ValueError where it is no plan of this schema."""
        return Plan.from_object(json_values.parse(text))

    @staticmethod
    def from_object(data: object) -> Plan:
        """The same of JSON that is parsed already."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not a plan of schema {SCHEMA}")
        if data.get(NARROWED, []) != []:
            raise ValueError('it saves values in fewer bits (narrow="auto"), which no version does any more')
        fields = {name: item for name, item in data.items() if name not in ("schema", NARROWED)}
        return json_values.read_as(Plan, {"written": [], **fields})  # files of before it was there
