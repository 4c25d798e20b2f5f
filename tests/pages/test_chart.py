"""Bins keep peaks, and shapes and labels stand where the bytes say."""

import re
from dataclasses import replace

import pytest

from compile_remat.pages.chart import HEIGHT, MOST_BINS, binned, drawing
from compile_remat.pages.figures import Kind
from tests.pages.examples import MIB, large, small, small_step


def test_few_columns_are_bins_of_their_own() -> None:
    step = small_step()
    bins = binned(step)
    assert bins.columns == (0, 1, 2, 3, 4, 5) and bins.num_forward == 3
    assert bins.areas == step.areas and bins.live_bytes == step.live_bytes
    assert step.other is not None and bins.other == step.other.live_bytes


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_columns_that_are_put_together_keep_the_peaks_and_the_end_of_the_forward(most: int) -> None:
    step = small_step()
    bins = binned(step, most)
    assert max(bins.live_bytes) == 9 * MIB and max(bins.other) == 12 * MIB
    assert all((column < step.num_forward) == (k < bins.num_forward) for k, column in enumerate(bins.columns))


def test_a_large_step_has_bins_that_can_be_seen() -> None:
    step = large().step
    assert step is not None
    bins = binned(step)
    assert len(bins.columns) <= MOST_BINS + 1 and max(bins.live_bytes) == max(step.live_bytes)


def test_the_outline_of_an_area() -> None:
    """Saved is the lowest area but for the output of 1 MiB that begins in the third column."""
    drawn = drawing(small(), small_step())
    (path,) = re.findall(r'<path class="saved"[^>]* d="([^"]*)"', drawn.shapes)
    y = {n: round(HEIGHT * (1 - n * MIB / drawn.scale.top_bytes)) for n in range(8)}
    assert path == f"M0 {y[4]}H2V{y[5]}H4V{y[7]}H5V{y[3]}H6V{y[3]}H4V{y[1]}H2V{y[0]}H0Z"


def test_labels_name_peaks_and_lines() -> None:
    labels = {label.role: label for label in drawing(small(), small_step()).labels if label.role != "area"}
    assert {role: label.text for role, label in labels.items()} == {
        "plan": "peak 9.0 MiB",
        "other": "plain torch.compile 12.0 MiB",
        "budget": "budget 10.0 MiB",
        "floor": "floor 8.0 MiB",
    }
    assert labels["plan"].x == pytest.approx(3.5 / 6)
    assert {labels[name].side for name in ("budget", "floor")} == {"start"}, "far from the label of the peak"


def test_a_budget_at_the_peak_is_named_below_its_line_and_not_over_the_floors_name() -> None:
    for floor_bytes, is_below in ((None, True), (4 * MIB, True), (9 * MIB, False)):
        figures = replace(small(), budget_bytes=9 * MIB + 4096, floor_bytes=floor_bytes)
        labels = {label.role: label for label in drawing(figures, small_step()).labels}
        assert labels["budget"].is_below == is_below


def test_a_budget_far_above_all_curves_is_left_out() -> None:
    """Else nobody could see the curves."""
    drawn = drawing(replace(small(), budget_bytes=100 * MIB), small_step())
    assert "budget" not in {label.role for label in drawn.labels}
    assert drawn.scale.top_bytes < 20 * MIB


def test_a_kind_that_is_never_live_is_not_drawn() -> None:
    step = small_step()
    step = replace(step, areas={**step.areas, Kind.GRADIENT: (0,) * 6})
    assert 'class="gradient"' not in drawing(small(), step).shapes
