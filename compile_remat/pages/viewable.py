"""The base class of plans and reports that can be shown as pages, pictures and traces."""

from __future__ import annotations

import json
import os
import pickle
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from compile_remat._util.atomic_write import write_atomically
from compile_remat.pages.figures import PageFigures

POINTS = 10
"""Default number of budgets in the frontier of a page."""


class Viewable(ABC):
    """Has figures that can be shown as a page, in a notebook, in matplotlib, or as a trace."""

    @abstractmethod
    def figures(self, points: int = 0) -> PageFigures:
        """Returns the figures of a page, with a frontier of `points` budgets (0: no frontier, which saves a search of seconds)."""

    def to_html(self, path: str | os.PathLike[str], *, points: int = POINTS) -> None:
        """Write one self-contained HTML page: live bytes over the step, its tensors, modules, the frontier.

        Args:
            points: Number of budgets in the frontier; 0 leaves the frontier out and saves some seconds.

        Raises:
            OSError: The file cannot be written.
        """
        from compile_remat.pages.page import write_page

        write_page(self.figures(points), path)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step for Perfetto (ui.perfetto.dev): a slice for each node, estimated times, live bytes by kind.

        Raises:
            OSError: The file cannot be written.
            ValueError: The tensors are unknown, because the plan was read from JSON.
        """
        from compile_remat.pages.trace_events import chrome_trace

        write_atomically(Path(path), json.dumps(chrome_trace(self.figures())))

    def to_memory_snapshot(self, path: str | os.PathLike[str], *, measured: dict[str, Any] | None = None) -> None:
        """Write the predicted step as a snapshot of the allocator, for pytorch.org/memory_viz: a pickle, as torch writes it.

        Args:
            measured: The result of ``torch.cuda.memory._snapshot()`` after a real step.  The file then has both, and the viewer's
                choice of a device changes between them: the predicted step is the last device.

        Raises:
            OSError: The file cannot be written.
            ValueError: The tensors are unknown, because the plan was read from JSON, or `measured` is no snapshot.
        """
        from compile_remat.pages.allocator_snapshot import memory_snapshot

        write_atomically(Path(path), pickle.dumps(memory_snapshot(self.figures(), measured)))

    def plot(self) -> Any:
        """Returns live bytes over the step as a ``matplotlib.figure.Figure``.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ValueError: The tensors of the plan are unknown.
        """
        from compile_remat.pages.plot import step_plot

        return step_plot(self.figures())

    def _repr_html_(self) -> str:
        """Returns the picture and a short table as HTML, for notebooks."""
        from compile_remat.pages.page import notebook_html

        return notebook_html(self.figures())
