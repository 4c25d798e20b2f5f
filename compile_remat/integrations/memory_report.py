"""One training step measured, and what the backend says of it: what the callbacks for the Trainer and for Lightning share."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import compile_remat


def mebibytes(nbytes: int | None) -> str:
    """For people."""
    return "-" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


class MemoryReport:
    """Measures one call of the model, forward and backward, and then prints budget, predicted and measured peak, largest batch.

    Args:
        step: Which call of `begin` starts it, from 1.  The first one compiles, and where a step has several graphs the second one
            compiles their final plans.
        build: A function of `batch` that returns a model and its inputs, for the largest batch that the device trains; see
            `compile_remat.largest_batch`.  Left out, it is known only where the shapes vary.
        settings: What `compile_remat.largest_batch` takes: `device`, `optimizer_state`, ...

    Attributes:
        text: What was printed; empty before that.
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

    def lines(self) -> list[str]:
        """One line for each graph that ran, one for the step, one for the largest batch."""
        planned = {report.graph_key: report for report in compile_remat.reports() if report.plan is not None}
        ran = [planned[key] for key in dict.fromkeys(self.measured.ran) if key in planned]
        if not ran:  # under `install` nobody knows which graphs run
            ran = list(planned.values())
        if not ran:
            return [f"no graph with a plan: forward and backward took {mebibytes(self.measured.peak_bytes)}"]
        found = [
            f"graph {report.graph_key}: memory_budget {report.budget} ({mebibytes(report.budget_bytes)}), "
            f"predicted peak {mebibytes(report.predicted_peak_bytes)}, measured {mebibytes(report.measured_peak_bytes)}"
            for report in ran
        ]
        found.append(f"forward and backward: measured peak {mebibytes(self.measured.peak_bytes)}")
        found += [f"the budget holds for {report.size_range}" for report in ran if report.size_range is not None]
        if self.build is not None:
            largest = compile_remat.largest_batch(self.build, **self.settings)
            found.append(f"largest batch on {self.settings['device']}: {largest.batch}")
        return found
