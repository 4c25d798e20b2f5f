"""One measured training step beside the plans of its graphs, as lines to print and as figures to log."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

import compile_remat
from compile_remat._util.units import MIB, format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import warn
from compile_remat.integrations.batch_size import batch_bytes, batch_text
from compile_remat.report_table import UNKNOWN

if TYPE_CHECKING:  # to import it takes torch, which a callback imports when training begins
    from torch import Tensor

    from compile_remat.passes import Plan
    from compile_remat.report import Report


NOTICED_SHARE = 0.1
"""A measured peak is said to be above the predicted one from this share of the predicted one on, and from 1 MiB on."""


def mebibytes(nbytes: int | None) -> str:
    """Returns bytes as text for people; "-" if they are unknown."""
    return "-" if nbytes is None else format_bytes(nbytes, "MiB")


def step_peak_bytes(ran: "Sequence[Report]") -> int | None:
    """Returns the predicted peak of a step of these graphs; the largest of their own peaks while the step's is unknown."""
    return _largest(report.step_peak_bytes for report in ran) or _largest(report.predicted_peak_bytes for report in ran)


def step_budget_bytes(ran: "Sequence[Report]") -> int | None:
    """Returns the budget of a step in which these graphs ran; None if the setting stands for no number of bytes, or not yet.

    Graphs that share a budget in bytes have no bytes of their own before plans are chosen for all of them: the setting names them.
    """
    given = [MemoryBudget.parse(report.budget) for report in ran]
    return (
        _largest(report.step_budget_bytes for report in ran)
        or _largest(int(budget.value or 0) for budget in given if budget.kind == "bytes")
        or _largest(report.budget_bytes for report in ran)
    )


def _plans() -> "list[Plan | None]":
    """The plans that graphs have so far: others after a call show that it compiled."""
    return [report.plan for report in compile_remat.reports()]


def _largest(sizes: Iterable[int | None]) -> int | None:
    return max((nbytes for nbytes in sizes if nbytes is not None), default=None)


def _budget_text(settings: Iterable[str], nbytes: int | None) -> str:
    """The setting, or several, and the bytes that they stand for, if any."""
    return f"memory_budget {' and '.join(settings)}" + ("" if nbytes is None else f" ({mebibytes(nbytes)})")


def _graph_line(report: "Report") -> str:
    measured = "" if report.measured_peak_bytes is None else f", measured {mebibytes(report.measured_peak_bytes)}"
    return (
        f"{report.module or UNKNOWN}: {_budget_text([report.budget], report.budget_bytes)}, "
        f"predicted peak {mebibytes(report.predicted_peak_bytes)}{measured}, graph {report.graph_key}"
    )


class MemoryReport:
    """The measurement of one call of a model, forward and backward; prints budget, predicted and measured peak, largest batch.

    The figures are those of the largest batch so far, by the bytes of its tensors: a call with a larger one is measured again, and
    so is a call that is no smaller than a measured one in which a plan was compiled.

    Args:
        step: The first call of `begin` that may be measured, from 1.  The first one compiles, and where a step has several graphs
            the second one compiles their final plans.
        build: A function of `batch` that returns a model and its inputs, for the largest batch that the device trains; see
            `compile_remat.largest_batch`.  Left out, it is known only where the shapes vary.
        settings: Arguments of `compile_remat.largest_batch`: `device`, `optimizer_state`, ...

    Attributes:
        text: The text that was printed last; empty before that.
        accumulated: A line on gradients that accumulate beside the plan, see `accumulates`; empty without them.
        measured: The measured step.
        batch: Name and shape of the largest tensor in the batch of that step; empty if unknown.
    """

    def __init__(self, step: int = 3, build: Callable[..., Any] | None = None, **settings: Any) -> None:
        self.step, self.build, self.settings = step, build, settings
        self.text = self.batch = self.accumulated = ""
        self.measured = compile_remat.MeasuredStep()
        self._begun, self._largest_bytes = 0, -1
        self._open: ExitStack | None = None
        self._next, self._next_batch, self._next_bytes = self.measured, "", 0
        self._plans: list[Plan | None] = []
        self._has_compiled = self._has_warned = False

    def accumulates(self, micro_batches: int, parameters: "Iterable[Tensor]") -> None:
        """Gradients of these parameters accumulate over micro-batches: from now on, the text says how many bytes they take."""
        from compile_remat.device.free_memory import trainable_bytes

        nbytes = trainable_bytes(list(parameters))
        self.accumulated = (
            f"{micro_batches} micro-batches in a step: from the second one on, {mebibytes(nbytes)} of accumulated gradients lie "
            "beside the plan and its budget; see docs/guides/gradient-accumulation.md"
        ) * bool(micro_batches > 1 and nbytes)

    def begin(self, batch: Any = None) -> None:
        """A forward is about to run.

        Args:
            batch: The inputs of the model: a tensor, or tensors in dicts and lists.  Left out, one call stands for all.
        """
        self._begun += 1
        nbytes = batch_bytes(batch)
        if self._open is not None or self._begun < self.step or nbytes <= self._largest_bytes:
            return
        self._plans = _plans()
        self._open = ExitStack()
        self._next = self._open.enter_context(compile_remat.measured_step())
        self._next_batch, self._next_bytes = batch_text(batch), nbytes

    def end(self) -> None:
        """A backward has run."""
        if self._open is None:
            return
        self._open.close()
        self._open = None
        self.measured, self.batch = self._next, self._next_batch
        self._has_compiled = [*map(id, self._plans)] != [*map(id, _plans())]
        self._largest_bytes, self._plans = self._next_bytes - self._has_compiled, []
        self.text = "\n".join(self.lines())
        print(self.text)
        if (outside := self._outside_text()) and not self._has_warned:
            self._has_warned = True
            warn(outside)

    def figures(self) -> dict[str, float]:
        """The measured step as numbers for a tool's log; empty before the step has been measured.

        `remat_measured_mib` is the measured peak, `remat_predicted_mib` the predicted one, `remat_budget_mib` the budget (left out
        if it stands for no number of bytes) and `remat_extra_share` the planned extra time as a share of the step.  If several
        graphs ran, predicted peak and budget are those of the step once plans were chosen for all of them together, from its third
        call on; before, the predicted peak is the largest of theirs.
        """
        if self.measured.peak_bytes is None:
            return {}
        ran = self._ran()
        sizes = {"remat_predicted_mib": step_peak_bytes(ran), "remat_budget_mib": step_budget_bytes(ran)}
        found = {"remat_measured_mib": self.measured.peak_bytes / MIB}
        found |= {name: nbytes / MIB for name, nbytes in sizes.items() if nbytes is not None}
        plans = [report.plan for report in ran if report.plan is not None]
        if step_time_ns := sum(plan.once_time_ns for plan in plans):
            extra_ns = sum(plan.extra_share * plan.once_time_ns for plan in plans)
            found["remat_extra_share"] = extra_ns / step_time_ns
        return found

    def postfix(self) -> str:
        """The measured peak beside the budget, for a progress bar; empty before the step has been measured."""
        figures = self.figures()
        if not figures:
            return ""
        budget = f" of {figures['remat_budget_mib']:.1f}" if "remat_budget_mib" in figures else ""
        return f"peak {figures['remat_measured_mib']:.1f}{budget} MiB"

    def _ran(self) -> "list[Report]":
        """The reports of the graphs that ran in the measured step."""
        planned = {report.graph_key: report for report in compile_remat.reports() if report.plan is not None}
        ran = [planned[key] for key in dict.fromkeys(self.measured.ran) if key in planned]
        return ran or list(planned.values())  # under `install` nobody knows which graphs run

    def _step_line(self, ran: "list[Report]") -> str:
        """The whole step: budget, predicted and measured peak."""
        largest_alone = len(ran) > 1 and not any(report.step_peak_bytes for report in ran)
        return (
            f"forward and backward: {_budget_text(dict.fromkeys(report.budget for report in ran), step_budget_bytes(ran))}, "
            f"predicted peak {mebibytes(step_peak_bytes(ran))}"
            + f" (of {len(ran)} graphs, the largest)" * largest_alone
            + f", measured peak {self._measured_text()}"
        )

    def _measured_text(self) -> str:
        return mebibytes(self.measured.peak_bytes) + f" at {self.batch}" * bool(self.batch)

    def _outside_text(self) -> str:
        """A sentence on measured bytes that no graph has; empty if they are few, or if the prediction or the figure is a rough one.

        Without a peak of the step, its graphs take at most the sum of theirs.
        """
        ran = self._ran()
        if self._has_compiled or not all(report.observed_peak_bytes for report in ran):
            return ""
        of_graphs = sum(report.predicted_peak_bytes or 0 for report in ran)
        known_bytes = _largest(report.step_peak_bytes for report in ran) or of_graphs
        measured_bytes = self.measured.peak_bytes or 0
        if not ran or measured_bytes - known_bytes <= max(MIB, NOTICED_SHARE * known_bytes):
            return ""
        return (
            f"about {mebibytes(measured_bytes - known_bytes)} lie outside of the compiled graphs, beside their budget: eager code "
            'such as a loss or metrics, or a tool\'s own buffers; see "Memory outside of the graphs" in docs/guides/trainer.md'
        )

    def lines(self) -> list[str]:
        """One line for the step, then one for each graph that ran, its name first and its key last; the largest batch."""
        ran = self._ran()
        if not ran:
            return [f"no graph with a plan: forward and backward took {self._measured_text()}"]
        found = [self._step_line(ran), *filter(None, [self._outside_text()]), *map(_graph_line, ran)]
        found += [
            f"{report.module or UNKNOWN}: the budget holds for {report.size_range}"
            for report in ran
            if report.size_range is not None
        ]
        found += filter(None, [self.accumulated])
        if self.build is not None:
            found.append(f"largest batch on {self.settings['device']}: {self._largest_batch}")
        return found

    @cached_property
    def _largest_batch(self) -> int | str:
        """The largest batch, or the reason why it is not known."""
        assert self.build is not None
        found = compile_remat.largest_batch(self.build, **self.settings)
        return found.why if found.batch is None else found.batch
