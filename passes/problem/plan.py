"""The planner's answer as plain data: the saved values, their cost, and a bound on the distance to the best plan."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from compile_remat._util import json_values
from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import common_unit, format_bytes, format_time
from compile_remat.pages.figures import PLAIN, PREDICTED, BaseStep, PageFigures, PictureSource
from compile_remat.pages.viewable import Viewable
from compile_remat.passes.problem.problem import SCHEMA

NARROWED = "narrowed"
"""A former field of plan files: the values that the plan saves in fewer bits.  A file is read only if this field is empty."""

FORMER = {"step_time_ns": "once_time_ns"}
"""Names of fields in older plan files, with their names now."""


class Status(StrEnum):
    """The outcome of planning; a failure is data, not an exception."""

    OPTIMAL = "optimal: no plan within the budget is faster"
    FEASIBLE = "feasible: fits the budget; the gap says how much faster another plan could be at most"
    OVER_BUDGET = "over budget: no plan found fits; this is the lowest one, which runs unless the budget is in bytes"
    REPLAYED = "replayed: read from a plan file"
    FALLBACK = "fallback: torch's own choice, because the planner failed"


@dataclass(frozen=True)
class SlicedProduct:
    """A product whose rows, with all values computed from these rows, are computed in slices.

    Attributes:
        name: The product's node in the joint graph.
        slices: The number of slices.
        at_once: True if the forward computes the gradients, too, for an incoming gradient of 1, and the backward scales them.
    """

    name: str
    slices: int
    at_once: bool = False

    def __str__(self) -> str:
        return f"{self.name} in {self.slices}" + ", gradients in the forward" * self.at_once


@dataclass(frozen=True)
class Offloaded:
    """A saved value that waits for the backward in host memory.

    Attributes:
        name: The value's node in the joint graph.
        release_before: The node of the forward before which the value's memory is free again; empty for the forward's end.
        fetch_before: The node of the backward before which the value's memory is taken again; empty for the value's first reader.
    """

    name: str
    release_before: str = ""
    fetch_before: str = ""


@dataclass(frozen=True)
class Plan(Viewable):
    """A choice of values to save; the backward recomputes the other values that it reads.

    Attributes:
        problem_key: `Problem.key()` of the problem that the plan solves.
        status: The outcome of the search.
        budget_bytes: The budget that the plan was asked to fit; None if only speed or only memory counted.
        saved: Names of the saved values that the backward reads.
        recomputed: Names of the values that the backward recomputes, once or more often.
        again: Recomputed values with a second copy in the backward, see `recursive`; a first run that nothing reads is left out.
        peak_bytes: Predicted peak of the region: the most bytes live at once in forward and backward.
        forward_peak_bytes: The most bytes live at once in the forward.
        saved_bytes: Bytes of saved values that the forward hands to the backward, outputs not counted.
        input_copy_bytes: Bytes of input copies that the forward also hands to the backward: weights in a convolution's layout.
        largest: The largest tensors live at the peak.
        output_bytes: Bytes of the outputs.
        once_time_ns: Estimated time of forward and backward with each kernel run once: nothing is recomputed, and nothing is
            written only to be saved.
        recompute_time_ns: Estimated time of the recomputed values.
        saving_time_ns: Estimated time of the traffic of saving.
        extra_time_ns: Estimated time beyond the fastest plan of any size; the search minimises this time.  Reports show the time
            beyond `base` instead.
        bound_time_ns: Proven least `extra_time_ns` of any plan within the budget, or without a budget, within the plan's own
            peak; for a plan without `again`, of any other plan without `again`.
        least_peak_bytes: Proven bound: no plan has a lower peak, whatever values it recomputes and how often.
        simulations: Number of plans tried in the search: the deterministic measure of the planner's work.
        written: Steps that the backward's graph marks as written to memory, see `Assumptions`.
        sliced: Products computed in slices of rows; the other names are those of the graph that has these slices.
        offloaded: Saved values that wait for the backward in host memory, in the order in which it fetches them.
        offloaded_bytes: Bytes of these values.
        host_bytes: Bytes of host memory that they take, where torch rounds each up to a power of two.
        link_bytes: The most bytes that the link to the host takes away during the forward, within the host's memory.
        stall_time_ns: Estimated time by which their copies prolong the step.
        plain_time_ns: Estimated time of the step under plain torch.compile's own plan; None if not asked for.
        pictures: Draws the plan; None for a plan read from JSON, whose totals alone are known.  Not part of the plan's JSON.
    """

    problem_key: str
    status: Status
    budget_bytes: int | None
    saved: tuple[str, ...]
    recomputed: tuple[str, ...]
    peak_bytes: int
    forward_peak_bytes: int
    saved_bytes: int
    once_time_ns: int
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
    offloaded: tuple[Offloaded, ...] = ()
    offloaded_bytes: int = 0
    host_bytes: int = 0
    link_bytes: int = 0
    stall_time_ns: int = 0
    saving_time_ns: int = 0
    plain_time_ns: int | None = field(default=None, compare=False)
    pictures: PictureSource | None = field(default=None, compare=False, repr=False)

    @property
    def held_bytes(self) -> int:
        """Bytes held from the end of the forward to the backward: saved values, input copies and outputs."""
        return self.saved_bytes + self.input_copy_bytes + self.output_bytes

    @property
    def time_ns(self) -> int:
        """Estimated time of the step: its kernels, the recomputed values, the traffic of saving, and waiting for copies."""
        return self.once_time_ns + self.recompute_time_ns + self.saving_time_ns + self.stall_time_ns

    @property
    def base(self) -> BaseStep:
        """The base of the plan's extra time: plain torch.compile's own plan, or the fastest plan if that is not known."""
        if self.plain_time_ns is None:
            return BaseStep(self.time_ns - self.extra_time_ns)
        return BaseStep(self.plain_time_ns, PLAIN)

    @property
    def extra_share(self) -> float:
        """The plan's extra time as a share of the `base`; below 0 if the plan is faster."""
        return self.base.share_of(self.time_ns)

    @property
    def bound_share(self) -> float:
        """The lower bound of `extra_share`."""
        return self.base.share_of(self.time_ns - self.extra_time_ns + self.bound_time_ns)

    @property
    def gap(self) -> float:
        """Time between the plan and its lower bound, as a fraction of the step's estimated time."""
        return (self.extra_time_ns - self.bound_time_ns) / max(1, self.once_time_ns)

    @property
    def slices_text(self) -> str:
        """Text: the sliced products with their numbers of slices; empty if there is none."""
        return ("; " if any(product.at_once for product in self.sliced) else ", ").join(map(str, self.sliced))

    @property
    def offload_text(self) -> str:
        """Text: bytes and number of the values that wait on the host, and the time of their copies; empty if there is none."""
        if not self.offloaded:
            return ""
        moved = f"{format_bytes(self.offloaded_bytes)} in {len(self.offloaded)} tensors"
        taken = f" ({format_bytes(self.host_bytes)} of pinned memory)" if self.host_bytes > self.offloaded_bytes else ""
        share = (
            f", {self.offloaded_bytes / self.link_bytes:.0%} of what can leave in the forward"
            if self.link_bytes
            else ""
        )
        return f"{moved}{taken}{share}; their copies prolong the step by {format_time(self.stall_time_ns)}"

    def peak_bound_text(self, unit: str = "", floor_bytes: int | None = None) -> str:
        """Text: the peak bound, as proven, and the gap to the lowest peak that was found, if that is given."""
        gap = (
            "no plan is lower" if floor_bytes is None else f"gap {floor_bytes / max(1, self.least_peak_bytes) - 1:.1%}"
        )
        return f"{format_bytes(self.least_peak_bytes, unit)} (proven; {gap})"

    @property
    def unit(self) -> str:
        """The unit of the plan's budget and peak in texts, in which the two can be compared."""
        return common_unit(self.budget_bytes, self.peak_bytes)

    @property
    def is_feasible(self) -> bool:
        """True if the predicted peak lies within the budget, or if there is no budget."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def __str__(self) -> str:
        """The totals and the largest tensors at the peak, in fixed width."""
        unit = self.unit
        budget = "none" if self.budget_bytes is None else format_bytes(self.budget_bytes, unit)
        peak, forward = format_bytes(self.peak_bytes, unit), format_bytes(self.forward_peak_bytes, unit)
        recursive = f", {len(self.again)} of them in recursive segments" if self.again else ""
        rows = [
            ("status", self.status.value),
            ("budget", budget),
            ("predicted peak", f"{peak} (forward {forward})"),
            ("saved", f"{format_bytes(self.saved_bytes)} in {len(self.saved)} tensors"),
            ("recomputed", f"{len(self.recomputed)} values{recursive}, {self._overhead_text}"),
            *self._time_rows,
        ]
        if self.sliced:
            rows.append(("slices", self.slices_text))
        if self.offloaded:
            rows.append(("on the host", self.offload_text))
        if self.least_peak_bytes:
            rows.append(("peak bound", self.peak_bound_text(unit)))
        lines = [f"  {name:<15} {text}" for name, text in rows]
        lines += ["  largest at the peak:"] if self.largest else []
        lines += [f"    {tensor}" for tensor in self.largest]
        return "\n".join(["Plan", *lines])

    @property
    def _overhead_text(self) -> str:
        """Text: the times of recomputing and saving, beside those of the base; the differences add up to the extra time."""
        share = self.recompute_time_ns / max(1, self.time_ns)
        again = f"{format_time(self.recompute_time_ns)} ({share:.1%} of the step)"
        text = f"{again}; saving takes {format_time(self.saving_time_ns)}"
        if self.sliced:  # sliced kernels are not those of the base
            return text
        return f"{text} ({self.base.name}: {format_time(self.base.time_ns - self.once_time_ns)} for both)"

    @property
    def _time_rows(self) -> list[tuple[str, str]]:
        base, bound_ns = self.base, self.time_ns - self.extra_time_ns + self.bound_time_ns
        gap = (self.time_ns - bound_ns) / max(1, base.time_ns)
        bound = f"{format_time(bound_ns - base.time_ns)} ({self.bound_share:+.2%}), gap {gap:.2%}"
        return [
            ("step", f"{format_time(self.time_ns)}, {base.name} {format_time(base.time_ns)} (estimated)"),
            ("extra time", f"{format_time(self.time_ns - base.time_ns)} ({self.extra_share:+.2%})"),
            ("lower bound", bound if self.is_feasible else "of no plan: none is known within the budget"),
        ]

    def figures(self, points: int = 0) -> PageFigures:
        """The figures of the plan's page, with a frontier of `points` budgets; the totals alone if `pictures` is None."""
        held = f"{format_bytes(self.saved_bytes)} in {len(self.saved)} tensors"
        again = f"{len(self.recomputed)} values, {self._overhead_text}"
        facts = (
            ("status", self.status.value),
            ("saved", held),
            ("recomputed", again),
            *self._time_rows,
            *[("slices", self.slices_text)] * bool(self.sliced),
            *[("on the host", self.offload_text)] * bool(self.offloaded),
            *[("peak bound", self.peak_bound_text())] * bool(self.least_peak_bytes),
            ("graph", self.problem_key),
        )
        bare = PageFigures(
            title="Plan",
            summary=f"Peaks at {format_bytes(self.peak_bytes)}; the step takes {100 * self.extra_share:+.1f} % against "
            f"{self.base.name} (estimated). Saves {held}, recomputes {len(self.recomputed)} values.",
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
        """Returns the plan as JSON that a person can read and diff; `from_json` returns an equal plan."""
        fields = {name: value for name, value in asdict(self).items() if name != "pictures"}
        return json.dumps({"schema": SCHEMA, **fields, "status": self.status.name}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads the text of `to_json`; ValueError if the text is no plan of this schema."""
        return Plan.from_object(json_values.parse(text))

    @staticmethod
    def from_object(data: object) -> Plan:
        """Reads a plan from parsed JSON; ValueError as in `from_json`."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"not a plan of schema {SCHEMA}")
        if data.get(NARROWED, []) != []:
            raise ValueError('it saves values in fewer bits (narrow="auto"), which is no longer supported')
        fields = {FORMER.get(name, name): item for name, item in data.items() if name not in ("schema", NARROWED)}
        return json_values.read_as(
            Plan,
            {
                "written": [],
                "offloaded": [],
                "offloaded_bytes": 0,
                "host_bytes": 0,
                "link_bytes": 0,
                "stall_time_ns": 0,
                **fields,
            },
        )  # older files have no such fields
