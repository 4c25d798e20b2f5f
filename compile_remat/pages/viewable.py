"""What plans and reports have in common for those who want to see them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any

from compile_remat.pages.figures import PageFigures

POINTS = 10
"""Budgets of the frontier on a page."""


class Viewable(ABC):
    """Has figures that can be looked at: as a page, in a notebook, in matplotlib."""

    @abstractmethod
    def figures(self, points: int = 0) -> PageFigures:
        """What there is to see, with a frontier of so many budgets (0: none, which spares a search of some seconds)."""

    def to_html(self, path: str | os.PathLike[str], *, points: int = POINTS) -> None:
        """Write one self-contained HTML page: live bytes over the step, its tensors, modules, the frontier.

        Args:
            points: How many budgets the frontier is sought for; 0 leaves it out, and spares some seconds.

        Raises:
            OSError: The file cannot be written.
        """
        from compile_remat.pages.page import write_page

        write_page(self.figures(points), path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step for Perfetto (ui.perfetto.dev): a node a slice, with estimated times, and live bytes by kind.

        Raises:
            OSError: The file cannot be written.
            ValueError: The plan was read from JSON; its tensors are not known.
        """
        from compile_remat.pages.trace_events import write_trace

        write_trace(self.figures(), path)

    def to_memory_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a snapshot of the allocator, for pytorch.org/memory_viz.

        Raises:
            OSError: The file cannot be written.
            ValueError: The plan was read from JSON; its tensors are not known.
        """
        from compile_remat.pages.allocator_snapshot import write_snapshot

        write_snapshot(self.figures(), path)

    def plot(self) -> Any:
        """Live bytes over the step as a ``matplotlib.figure.Figure``.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from compile_remat.pages.plot import step_plot

        return step_plot(self.figures())

    def _repr_html_(self) -> str:
        """The picture and a short table, for notebooks."""
        from compile_remat.pages.notebook import notebook_html

        return notebook_html(self.figures())
