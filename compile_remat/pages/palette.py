"""Colours of the kinds of bytes: one set for light and dark pages.

Each colour has a contrast of at least 3 to 1 to white and to near-black (WCAG 2.2, 1.4.11), and any two are at least 20 apart in
CIELAB (CIE76), for people with normal sight and with protanopia, deuteranopia or tritanopia (Machado et al. 2009, severity 1).
"""

from __future__ import annotations

from compile_remat.pages.figures import Kind

COLOURS = {
    Kind.OUTPUT: "#9c4f96",
    Kind.GRADIENT: "#3a9d5d",
    Kind.SAVED: "#2b6cd0",
    Kind.RECOMPUTED: "#d9730d",
    Kind.TEMPORARY: "#8f949c",
}
BACKGROUNDS = {"light": "#ffffff", "dark": "#15171c"}
INK = {"light": "#1b1e24", "dark": "#e8eaee"}
