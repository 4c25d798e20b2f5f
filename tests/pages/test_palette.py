"""Kinds can be told apart on both grounds, and by people who do not see all colours."""

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from compile_remat.pages.figures import COLOURS, Kind
from compile_remat.pages.page import html_page
from tests.pages.examples import small

Floats = NDArray[np.float64]

GROUNDS = dict(
    zip(("light", "dark"), re.findall(r"--ground: (#\w{6}); --ink: (#\w{6})", html_page(small())), strict=True)
)
"""Colours of the ground and of texts on it, from the page's style sheet."""

SIGHT: dict[str, Floats] = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB."""

XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> Floats:
    """Linear RGB of ``#rrggbb``."""
    c = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: Floats) -> Floats:
    """CIELAB of linear RGB under D65."""
    ratio = XYZ @ np.clip(rgb, 0, 1) / XYZ.sum(axis=1)
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG."""
    low, high = sorted(float(XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_every_kind_has_a_colour() -> None:
    assert list(COLOURS) == list(Kind)


@pytest.mark.parametrize("theme", list(GROUNDS))
def test_colours_stand_out_from_the_ground_and_text_can_be_read(theme: str) -> None:
    ground, ink = GROUNDS[theme]
    assert {k: c for k, c in COLOURS.items() if contrast(c, ground) < 3} == {}
    assert contrast(ink, ground) > 7


@pytest.mark.parametrize("sight", list(SIGHT))
def test_any_two_kinds_differ(sight: str) -> None:
    seen = {kind: lab(SIGHT[sight] @ linear(colour)) for kind, colour in COLOURS.items()}
    near = [(a.value, b.value) for a, b in combinations(Kind, 2) if np.linalg.norm(seen[a] - seen[b]) < 20]
    assert near == []
