"""Checkmate's layer graphs and Chen's chains: problems without torch, in the sources' own counts of bytes and time."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import numpy as np

from benchmarks.literature.planned import Network, Planned, Point
from benchmarks.literature.rows import BatchRow, Row
from benchmarks.models.layer_graphs import LAYER_GRAPHS, Layer, LayerGraph, training
from compile_remat.passes import Plan, Planner

ROOM_BYTES = 16_000_000_000
"""Memory of a V100, from which Checkmate subtracts twice the parameters."""

BATCHES = {"VGG19": 289, "U-Net": 61, "MobileNet": 1105}
"""The largest batches that Checkmate reaches with at most one extra forward."""

BATCH_REMARKS = {
    "MobileNet": "convolution and norm are computed again to reach a ReLU's output, and ours keeps them for the next two gradients"
}

FIGURE_BATCHES = {"VGG16": 256, "MobileNet": 512, "U-Net": 32}
"""Networks of figure 5, with their batches."""

UNET_POINT = Point(
    "16 GB of 23", ROOM_BYTES, 0.10, 'theirs is "less than 10% higher overhead", by measured times of layers'
)
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
ONLY_DRAWN = "figure 5 draws it without figures"
CHAINS = (16, 64, 256, 1024)
UNIT = 1000
"""Bytes and time of a layer, large enough that rounding to integers does not matter."""


def batch_rows(name: str, published: int) -> Iterator[Row]:
    """The largest batch, found by halving: one plan for each batch that is tried."""
    graph = LAYER_GRAPHS[name]()
    room = ROOM_BYTES - 2 * graph.parameter_bytes
    planner = Planner(graph.problem())
    most = room // planner.search.least_peak_bytes
    all_kept = room // planner.fastest().peak_bytes
    fits, fails = all_kept, most + 1
    while fails - fits > 1:
        batch = (fits + fails) // 2
        plan = planner.within(room // batch)
        if plan.is_feasible and plan.extra_time_ns <= graph.forward_operations:
            fits = batch
        else:
            fails = batch
    remark = BATCH_REMARKS.get(name, "") if fits < published else ""
    yield BatchRow("checkmate", name, published, fits, most, all_kept, remark)


def figure_rows(name: str) -> Iterator[Row]:
    """Parts of the peak without a plan, U-Net's point at 16 GB, and the frontier with Chen's rules beside it."""
    graph, batch = LAYER_GRAPHS[name](), FIGURE_BATCHES[name]
    problem = graph.problem(batch)
    fixed = 2 * graph.parameter_bytes
    peak = Planner(problem).fastest().peak_bytes + fixed
    planned = Planned(Network("checkmate", f"{name}, batch {batch}", "", peak, None, fixed, "GB"), problem)
    least = planned.planner.search.least_peak_bytes + fixed
    points = [
        Point(f"{share} of the peak", int(share * peak), None, ONLY_DRAWN) for share in SHARES if share * peak >= least
    ]
    if name == "U-Net":
        points.append(UNET_POINT)
    yield from planned.rows(points)
    square_root = point_of(planned, square_root_plan(planned.planner, len(graph.layers)))
    policies = {"Chen, square root of n": [square_root], "Chen, greedy": greedy_points(graph, planned)}
    yield planned.frontier_row([point for point in points if point.extra is not None], policies)


def point_of(planned: Planned, plan: Plan) -> list[float]:
    """A plan as bytes in the source's count and a part of the step."""
    return [plan.peak_bytes + planned.network.fixed_bytes, plan.extra_time_ns / max(1, plan.step_time_ns)]


def greedy_points(graph: LayerGraph, planned: Planned) -> list[list[float]]:
    """Chen's second rule: keep a layer where those since the last kept one fill so many bytes; one point for each size."""
    points = []
    total = sum(layer.nbytes for layer in graph.layers)
    for part in np.geomspace(0.02, 1.0, 24):
        kept, filled = [], 0
        for number, layer in enumerate(graph.layers):
            filled += layer.nbytes
            if filled > part * total:
                kept.append(number)
                filled = 0
        points.append(point_of(planned, kept_plan(planned.planner, kept)))
    return sorted(points)


def kept_plan(planner: Planner, kept: list[int]) -> Plan:
    """The plan that saves these values and computes the others again."""
    mask = np.zeros(len(planner.problem.values), dtype=bool)
    mask[kept] = True
    return planner.plan_of(mask, None)


def square_root_plan(planner: Planner, count: int) -> Plan:
    """Chen's first rule: of n layers keep each k-th, for k the square root of n."""
    every = isqrt(count)
    return kept_plan(planner, list(range(every - 1, count, every)))


def chain_rows(count: int) -> Iterator[Row]:
    """Chen's schedule on equal layers: forwards of one unit, gradients of two; its peak and time by our simulator."""
    problem = training([Layer(f"layer_{k}", UNIT, (k - 1,) if k else (), UNIT) for k in range(count)])
    planner = Planner(problem)
    network = Network("chen", f"{count} equal layers", "", planner.fastest().peak_bytes, unit="layers")
    planned = Planned(network, problem)
    nbytes, share = point_of(planned, square_root_plan(planner, count))
    yield from planned.rows([Point("square root of n", int(nbytes), share)])
