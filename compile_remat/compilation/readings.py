"""Collects the lowered graphs of a plan before their code is made, and leaves Inductor if the plan is refused."""

from __future__ import annotations

from collections.abc import Callable

from compile_remat._torch.sizes import sizes_at
from compile_remat._util.size_range import Sizes
from compile_remat.compilation.feedback import Emissions
from compile_remat.compilation.region_run import RegionRun
from compile_remat.inductor.observe import Emitted


class PlanRefused(Exception):
    """Raised to leave Inductor before it makes code: another plan is tried in place of this one."""


class PlanTaken(Exception):
    """Raised to leave Inductor before it makes code, as no code is wanted: the plan would be taken."""


class Readings:
    """Takes in the forward and the backward of one plan as Inductor lowers them.

    Args:
        judge: Called once the dry runs of both graphs are understood; raises `PlanRefused` to refuse the plan.
        sizes: Sizes of the symbols in the dry runs.
        stops: True to raise `PlanTaken` if the plan is taken.

    Attributes:
        left: The raised exception: torch suppresses all errors of a backward that it compiles early for varying sizes.
    """

    def __init__(self, judge: Callable[[RegionRun], None], sizes: Sizes = (), *, stops: bool = False) -> None:
        self._judge, self._sizes, self._stops = judge, sizes, stops
        self._lowered = Emissions()
        self.left: Exception | None = None

    def __call__(self, lowered: Emitted) -> None:
        """Take in one lowered graph."""
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
