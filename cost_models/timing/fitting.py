"""Least squares: the figures of a device that best explain what kernels were measured to take.

A figure is named by its place in the device's JSON object, e.g. ``("half_sizes", "matmul", 2)``. What is fitted is the
very model that prices plans: every trial writes the figures into the object, reads a device from it and asks its
`Roofline` for the price of each point. Errors are relative ones (logarithms), so that a product of 20 us counts as much
as one of 20 ms, and a point that some other process disturbed pulls less than in proportion (soft L1).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from compile_remat.cost_models.device.files import device_from_json
from compile_remat.cost_models.roofline import Roofline

Path = tuple[str | int, ...]
"""Keys and places that lead to a figure in the JSON object of a device."""

Price = Callable[[Roofline], float]
"""What a point costs by a model, in nanoseconds."""

_SMALLEST = 1e-3
"""Stands for lengths of 0, which have no logarithm."""

_REACH = math.log(1e4)
"""No figure is moved further from where it starts than by this factor."""

_SHIFTS = tuple(math.log(factor) for factor in (1, 4, 1 / 4, 16, 1 / 16, 64, 1 / 64))
"""A fit is searched from the given figures and from these multiples of them (as logarithms), and the best result is kept: where a
kernel's price is its memory traffic, it does not change with the rate of its arithmetic, and a search from there ends at once."""

_STEP = 0.01

_SOFT = 0.1
"""Relative error from which on a point counts in proportion only, not squared."""


@dataclass(frozen=True)
class Point:
    """One kernel: what it was measured to take, and what a model says."""

    name: str
    measured_ns: float
    price: Price

    def fitted_ns(self, model: Roofline) -> float:
        """The model's price."""
        return max(1.0, self.price(model))

    def error(self, model: Roofline) -> float:
        """By which part the price is above the measured time (or below, where negative)."""
        return self.fitted_ns(model) / self.measured_ns - 1


def model_of(content: Mapping[str, Any]) -> Roofline:
    """The model with these figures; float32 arithmetic is never TF32 in it."""
    return Roofline(device_from_json("calibrated", content, "calibration"), tf32_kinds=())


def fit(
    content: Mapping[str, Any], paths: Sequence[Path], points: Sequence[Point], most_efficiency: float = math.inf
) -> dict[str, Any]:
    """The object with the figures at `paths` changed so that the prices of `points` come closest to what was measured.

    Figures start where they stand; where nothing stands, the object has to have been given a start. Nothing is changed
    where there are no points.

    Args:
        most_efficiency: Of every efficiency among the figures: no kernel is faster than the rate that large products reach.
    """
    if not points or not paths:
        return copy.deepcopy(dict(content))
    start = np.array([math.log(max(float(_get(content, path)), _SMALLEST)) for path in paths])

    def errors(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        model = model_of(_with(content, paths, logarithms))
        return np.array([math.log(point.fitted_ns(model) / point.measured_ns) for point in points])

    def slopes(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        # By steps of a per cent: prices are whole nanoseconds, and scipy's own steps shrink to nothing at a figure of 1.
        here = errors(logarithms)
        steps = np.eye(len(logarithms)) * _STEP
        return np.stack([(errors(logarithms + step) - here) / _STEP for step in steps], axis=1)

    limit = math.log(most_efficiency)
    limits = np.array([limit if path[0] == "efficiency" else math.inf for path in paths])
    bounds = np.minimum(start, limits) - _REACH, np.minimum(start + _REACH, limits)
    fits = [
        scipy.optimize.least_squares(
            errors, np.clip(start + shift, *bounds), slopes, bounds, loss="soft_l1", f_scale=_SOFT
        )
        for shift in _SHIFTS
    ]
    return _with(content, paths, min(fits, key=lambda found: float(found.cost)).x)


def _with(content: Mapping[str, Any], paths: Sequence[Path], logarithms: NDArray[np.float64]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(content))
    for path, logarithm in zip(paths, logarithms, strict=True):
        put(changed, path, math.exp(float(logarithm)))
    return changed


def put(content: dict[str, Any], path: Path, figure: float) -> None:
    """Write a figure: whole numbers for counts of things, fractions and lengths as they are."""
    *way, last = path
    place: Any = content
    for key in way:
        place = place[key]
    is_count = path[0] not in ("efficiency", "half_sizes")
    place[last] = max(1, round(figure)) if is_count else figure


def _get(content: Mapping[str, Any], path: Path) -> Any:
    place: Any = content
    for key in path:
        place = place[key]
    return place
