"""Graphs that are lowered, as they come in before any code is made of them; and a plan that is refused for what they show."""

from __future__ import annotations

from collections.abc import Callable

from compile_remat._torch.sizes import sizes_at
from compile_remat._util.size_range import Sizes
from compile_remat.compilation.feedback import Emissions
from compile_remat.compilation.region_run import RegionRun
from compile_remat.inductor.observe import Emitted


class PlanRefused(Exception):
    """Leaves Inductor before it makes code: another plan is tried in place of this one."""


class PlanTaken(Exception):
    """Leaves Inductor before it makes code, where none is wanted: the plan would be taken."""


class Readings:
    """Takes in the forward and the backward of one plan as Inductor lowers them.

    Args:
        judge: Called once both are there and their dry runs understood; raises `PlanRefused` where the plan is not taken.
        sizes: Of the symbols, in the dry runs.
        stops: Whether `PlanTaken` is raised where the plan is taken.

    Attributes:
        left: The exception that was raised: torch suppresses all errors of a backward that it compiles early for varying sizes.
    """

    def __init__(self, judge: Callable[[RegionRun], None], sizes: Sizes = (), *, stops: bool = False) -> None:
        self._judge, self._sizes, self._stops = judge, sizes, stops
        self._lowered = Emissions()
        self.left: Exception | None = None

    def __call__(self, lowered: Emitted) -> None:
        """Take in one graph."""
        try:
            self._take_in(lowered)
        except Exception as error:
            self.left = error
            raise

    def _take_in(self, lowered: Emitted) -> None:
        self._lowered(lowered)
        with sizes_at(self._sizes):
            run = self._lowered.region_run()
            if run is None:
                return
            self._judge(run)
            if self._stops:
                raise PlanTaken
