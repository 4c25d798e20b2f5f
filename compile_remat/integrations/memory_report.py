"""One measured training step beside the plans of its graphs, as lines to print and as figures to log."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import compile_remat
from compile_remat._util.units import MIB, format_bytes
from compile_remat.report_table import UNKNOWN

if TYPE_CHECKING:  # to import it takes torch, which a callback imports when training begins
    from compile_remat.report import Report


def mebibytes(nbytes: int | None) -> str:
    """Returns bytes as text for people; "-" if they are unknown."""
    return "-" if nbytes is None else format_bytes(nbytes, "MiB")


class MemoryReport:
    """The measurement of one call of a model, forward and backward; prints budget, predicted and measured peak, largest batch.

    Args:
        step: The call of `begin` that starts the measurement, from 1.  The first one compiles, and where a step has several
            graphs the second one compiles their final plans.
        build: A function of `batch` that returns a model and its inputs, for the largest batch that the device trains; see
            `compile_remat.largest_batch`.  Left out, it is known only where the shapes vary.
        settings: Arguments of `compile_remat.largest_batch`: `device`, `optimizer_state`, ...

    Attributes:
        text: The text that was printed; empty before that.
        measured: The measured step.
    """

    def __init__(self, step: int = 3, build: Callable[..., Any] | None = None, **settings: Any) -> None:
        self.step, self.build, self.settings = step, build, settings
        self.text = ""
        self.measured = compile_remat.MeasuredStep()
        self._begun, self._open = 0, ExitStack()
        self._is_open = False

    def begin(self) -> None:
        """A forward is about to run."""
        self._begun += 1
        if self._begun == self.step:
            self.measured = self._open.enter_context(compile_remat.measured_step())
            self._is_open = True

    def end(self) -> None:
        """A backward has run."""
        if not self._is_open:
            return
        self._open.close()
        self._is_open = False
        self.text = "\n".join(self.lines())
        print(self.text)

    def figures(self) -> dict[str, float]:
        """The measured step as numbers for a tool's log; empty before the step has been measured.

        `remat_measured_mib` is the measured peak, `remat_predicted_mib` the predicted one, `remat_budget_mib` the budget (left out
        if it stands for no number of bytes) and `remat_extra_share` the planned extra time as a share of the step.  If several
        graphs ran, predicted peak and budget are the largest of theirs, and of the step if the graphs share one budget.
        """
        if self.measured.peak_bytes is None:
            return {}
        ran = self._ran()
        sizes = {
            "remat_predicted_mib": [report.step_peak_bytes or report.predicted_peak_bytes for report in ran],
            "remat_budget_mib": [report.step_budget_bytes or report.budget_bytes for report in ran],
        }
        found = {"remat_measured_mib": self.measured.peak_bytes / MIB}
        for name, values in sizes.items():
            if known := [value for value in values if value is not None]:
                found[name] = max(known) / MIB
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

    def lines(self) -> list[str]:
        """One line for each graph that ran, its name first and its key last; one for the step, one for the largest batch."""
        ran = self._ran()
        if not ran:
            return [f"no graph with a plan: forward and backward took {mebibytes(self.measured.peak_bytes)}"]
        found = [
            f"{report.module or UNKNOWN}: memory_budget {report.budget} ({mebibytes(report.budget_bytes)}), "
            f"predicted peak {mebibytes(report.predicted_peak_bytes)}, measured {mebibytes(report.measured_peak_bytes)}, "
            f"graph {report.graph_key}"
            for report in ran
        ]
        found.append(f"forward and backward: measured peak {mebibytes(self.measured.peak_bytes)}")
        found += [
            f"{report.module or UNKNOWN}: the budget holds for {report.size_range}"
            for report in ran
            if report.size_range is not None
        ]
        if self.build is not None:
            largest = compile_remat.largest_batch(self.build, **self.settings)
            found.append(f"largest batch on {self.settings['device']}: {largest.batch}")
        return found
