"""Least squares: the figures of a device that best explain the measured times of kernels.

A figure is named by its place in the device's JSON object, e.g. ``("half_sizes", "matmul", 2)``. The fit uses the same
model that prices plans: every trial writes the figures into the object, reads a device from it and asks its `Roofline`
for the price of each point. Errors are relative (logarithms), so that a product of 20 us counts as much as one of 20 ms.
The soft L1 loss limits the weight of points that another process disturbed.
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
"""Returns the price of a point under a model, in nanoseconds."""

_SMALLEST = 1e-3
"""Replaces figures of 0, such as lengths, which have no logarithm."""

_REACH = math.log(1e4)
"""Logarithm of the largest factor by which a fit may change a figure from its start."""

_SHIFTS = tuple(math.log(factor) for factor in (1, 4, 1 / 4, 16, 1 / 16, 64, 1 / 64))
"""Logarithms of factors: a search starts from the given figures times each factor, and the best result is kept. If the price of a
kernel is its memory traffic, it does not change with the rate of the arithmetic, and a search from that start ends at once."""

_STEP = 0.01

_SOFT = 0.1
"""Relative error above which a point counts in proportion to its error instead of squared."""


@dataclass(frozen=True)
class Point:
    """A kernel with its measured time in ns and its price under a model."""

    name: str
    measured_ns: float
    price: Price

    def fitted_ns(self, model: Roofline) -> float:
        """The price under the model in ns, at least 1."""
        return max(1.0, self.price(model))

    def error(self, model: Roofline) -> float:
        """Relative error of the price: positive if it is above the measured time."""
        return self.fitted_ns(model) / self.measured_ns - 1


def model_of(content: Mapping[str, Any]) -> Roofline:
    """The roofline model with the figures of a device's JSON object; it never prices float32 arithmetic as TF32."""
    return Roofline(device_from_json("calibrated", content, "calibration"), tf32_kinds=())


def fit(
    content: Mapping[str, Any], paths: Sequence[Path], points: Sequence[Point], most: Mapping[Path, float] | None = None
) -> dict[str, Any]:
    """A copy of `content` in which the figures at `paths` are changed so that the prices of `points` fit the measured times best.

    The search starts from the present figures, so each path must have one. Without points or paths nothing is changed.

    Args:
        most: Upper limits of figures that hardware cannot exceed: rates of its data sheet, and efficiencies of 1.
    """
    if not points or not paths:
        return copy.deepcopy(dict(content))
    start = np.array([math.log(max(float(_get(content, path)), _SMALLEST)) for path in paths])

    def errors(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        model = model_of(_with(content, paths, logarithms))
        return np.array([math.log(point.fitted_ns(model) / point.measured_ns) for point in points])

    def slopes(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        # Steps are one per cent: prices are whole nanoseconds, and scipy's own steps vanish at a figure of 1.
        here = errors(logarithms)
        steps = np.eye(len(logarithms)) * _STEP
        return np.stack([(errors(logarithms + step) - here) / _STEP for step in steps], axis=1)

    limits = np.array([math.log((most or {}).get(path, math.inf)) for path in paths])
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
    """Write a figure, in place: efficiencies and lengths as they are, all other figures rounded and at least 1."""
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
