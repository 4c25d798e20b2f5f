"""Figures through matplotlib."""

import sys
from dataclasses import replace

import pytest

from compile_remat.errors import MissingExtraError, RematError
from compile_remat.pages.plot import frontier_plot, step_plot
from tests.pages.examples import MIB, small


def test_a_step_has_its_areas_and_lines() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = step_plot(small()).axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == [
        "output", "gradient", "saved", "recomputed", "temporary", "plain torch.compile", "budget 10.0 MiB",
        "lowest reachable peak 8.0 MiB",
    ]  # fmt: skip
    assert axes.get_ylabel() == "live MiB" and axes.get_xlim() == (0, 6)
    assert [max(stairs.get_data().values) for stairs in axes.patches] == [12]
    tops = [max(path.vertices[:, 1]) for area in axes.collections for path in area.get_paths()]
    assert tops == [1, 3, 7, 8, 9]


def test_a_frontier() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = frontier_plot(small().frontier, small().base, "a model").axes
    curve, chosen = axes.lines
    assert curve.get_xdata().tolist() == [8, 9, 12] and curve.get_ydata().tolist() == [9, 5, 0]
    assert (chosen.get_xdata().tolist(), chosen.get_ydata().tolist()) == ([9], [5])
    assert axes.texts[0].get_text() == f"this plan: {9 * MIB >> 20}.0 MiB"


def test_a_second_curve_of_plans_that_move_nothing() -> None:
    pytest.importorskip("matplotlib")
    points = small().frontier
    without = tuple(replace(p, time_ns=p.time_ns + 10**6, is_chosen=False, moves_nothing=True) for p in points)
    (axes,) = frontier_plot((*points, *without), small().base).axes
    assert [line.get_xdata()[0] for line in axes.lines] == [8, 8, 9]
    assert axes.get_legend_handles_labels()[1] == ["nothing on the host"]


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'compile-remat\[plot\]'") as caught:
        step_plot(small())
    assert isinstance(caught.value, RematError) and isinstance(caught.value, ImportError)


def test_what_is_not_known_cannot_be_plotted() -> None:
    with pytest.raises(ValueError, match="something to note"):
        step_plot(replace(small(), step=None))
