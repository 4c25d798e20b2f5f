"""Moccasin's random layered graphs: in one order, cut in two, and as the forward of a training step."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.literature.planned import Network, Planned, Point
from benchmarks.literature.rows import PointRow, Row
from benchmarks.models.layer_graphs import Layer, training
from benchmarks.models.layered import DRAWINGS, Nodes, cut_at, layered, peak_of
from compile_remat.passes import Planner

SHARES = (0.9, 0.8)
CUTS = (0.5, 0.6, 0.7)
"""Parts of the order at which it is cut."""
MOST_NODES = 500
"""Larger graphs are planned only as training steps: each of their cuts takes minutes."""
NOT_FOUND = "their table was not found"
NO_CUT = NOT_FOUND + "; their nodes are computed again anywhere in the order, ours behind one cut"
TRAINING_BUDGETS = 2
"""Budgets of each frontier, which no picture shows."""


def order_rows(name: str, seed: int) -> Iterator[Row]:
    """The duration's increase at parts of the peak of the order, by the best of the cuts."""
    nodes = layered(DRAWINGS[name], seed)
    peak = peak_of(nodes, list(range(len(nodes))))
    network = Network("moccasin", f"{name}, one order", "", peak)
    points = [Point(f"{share} of the peak", int(share * peak), None, NO_CUT) for share in SHARES]
    cuts = [Planned(network, cut_at(nodes, int(cut * len(nodes))), TRAINING_BUDGETS).rows(points) for cut in CUTS]
    for rows in zip(*cuts, strict=True):
        yield min(rows, key=_rank)


def _rank(row: PointRow) -> tuple[float, int]:
    return (float("inf") if row.extra is None else row.extra, row.floor_bytes)


def training_rows(name: str, seed: int) -> Iterator[Row]:
    """The same graph with gradients as Checkmate adds them, at parts of the peak that keeps all."""
    problem = training(layers_of(layered(DRAWINGS[name], seed)))
    peak = Planner(problem).fastest().peak_bytes
    planned = Planned(Network("moccasin", f"{name}, training", "", peak), problem, TRAINING_BUDGETS)
    yield from planned.rows(
        [Point(f"{share} of the peak", int(share * peak), None, "not in their paper") for share in SHARES]
    )


def layers_of(nodes: Nodes) -> list[Layer]:
    return [Layer(f"n{k}", node.nbytes, node.reads, node.time_ns) for k, node in enumerate(nodes)]
