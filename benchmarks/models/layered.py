"""Random layered graphs as Moccasin is tried on (Bartan and others, ICML 2023), drawn from a seed; torch-free.

Its graphs were drawn by appendix A of Gagrani and others, "Neural topological ordering for computation graphs" (NeurIPS 2022).
Their parameters stand in the names of the files of haoming-codes/moccasin, and the drawing here follows them: 0.75 is how far
the width of a layer may be from the mean, in parts of it; 0.14 of the edges skip layers; widths are a share of the number of
layers.  Numbers of nodes and edges are those of the paper.  In its smallest graph durations look uniform up to 1,000 and sizes
like half of a normal distribution, from 80 to 6,150, and so they are drawn; the graphs themselves are not theirs.

All nodes are forward ones there: each is computed in a given order and may be computed again, until the last one is.  A plan
of ours computes again only behind the end of a forward.  So the order is cut in two: what is before the cut may be computed again
behind it, what is behind it is computed once.  Every such plan is a plan of theirs, and the best cut is taken.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import sqrt

from compile_remat.passes import Problem, Step, Value
from compile_remat.passes.problem.problem import CONSTANT, EXTERN

WIDTH_SPREAD, SKIPPING = 0.75, 0.14
SIZE_DEVIATION, LONGEST = 2700, 1000


@dataclass(frozen=True)
class Node:
    """One computation: bytes of its output, its duration, and the nodes that it reads, which stand before it."""

    nbytes: int
    time_ns: int
    reads: tuple[int, ...]


Nodes = tuple[Node, ...]


@dataclass(frozen=True)
class Drawing:
    """The paper's figures of a graph: nodes, edges, and width as a share of the number of layers."""

    nodes: int
    edges: int
    width: float


DRAWINGS = {
    "G1": Drawing(100, 236, 0.27),
    "G2": Drawing(250, 944, 0.43),
    "G3": Drawing(500, 2461, 0.36),
    "G4": Drawing(1000, 5857, 0.31),
}


def layered(drawing: Drawing, seed: int) -> Nodes:
    """A graph with one first and one last node, in an order drawn among the possible ones."""
    drawn = random.Random(seed)
    layers = _layers(drawing, drawn)
    layer_of = {node: k for k, layer in enumerate(layers) for node in layer}
    edges = {(drawn.choice(layers[k - 1]), node) for node, k in layer_of.items() if k}
    edges |= {
        (node, drawn.choice(layers[k + 1]))
        for node, k in layer_of.items()
        if k + 1 < len(layers) and not any(a == node for a, _ in edges)
    }
    while len(edges) < drawing.edges:
        k = drawn.randrange(len(layers) - 1)
        skips = drawn.random() < SKIPPING and k + 2 < len(layers)
        behind = drawn.randrange(k + 2, len(layers)) if skips else k + 1
        edges.add((drawn.choice(layers[k]), drawn.choice(layers[behind])))
    return _ordered(len(layer_of), edges, drawn)


def _layers(drawing: Drawing, drawn: random.Random) -> list[list[int]]:
    """Nodes of each layer, by number: one, then drawn widths, then one."""
    width = sqrt(drawing.nodes * drawing.width)
    layers, first = [[0]], 1
    while first < drawing.nodes - 1:
        wanted = max(1, round(width * (1 + drawn.uniform(-WIDTH_SPREAD, WIDTH_SPREAD))))
        count = min(wanted, drawing.nodes - 1 - first)
        layers.append(list(range(first, first + count)))
        first += count
    return [*layers, [drawing.nodes - 1]]


def _ordered(count: int, edges: set[tuple[int, int]], drawn: random.Random) -> Nodes:
    """The nodes with their figures in a random topological order: of those that are ready, one of the earliest ready ones."""
    reads: dict[int, list[int]] = {node: [] for node in range(count)}
    readers: dict[int, list[int]] = {node: [] for node in range(count)}
    for a, b in sorted(edges):
        reads[b].append(a)
        readers[a].append(b)
    missing = {node: len(reads[node]) for node in range(count)}
    ready, place, nodes = [0], dict[int, int](), list[Node]()
    while ready:
        node = ready.pop(drawn.randrange(min(4, len(ready))))
        place[node] = len(nodes)
        size = 10 * max(1, round(abs(drawn.gauss(0, SIZE_DEVIATION)) / 10))
        nodes.append(Node(size, drawn.randint(1, LONGEST), tuple(sorted(place[r] for r in reads[node]))))
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return tuple(nodes)


def cut_at(nodes: Nodes, cut: int) -> Problem:
    """The problem in which nodes before the cut may be computed again behind it; the last node is returned."""
    values = tuple(
        Value(f"n{k}", node.nbytes, EXTERN, node.reads, node.time_ns, position=k) for k, node in enumerate(nodes[:cut])
    )
    steps = [
        Step(
            f"n{cut + k}",
            node.nbytes,
            EXTERN,
            tuple(r for r in node.reads if r < cut),
            tuple(r - cut for r in node.reads if r >= cut),
            node.time_ns,
            is_output=cut + k == len(nodes) - 1,
        )
        for k, node in enumerate(nodes[cut:])
    ]
    steps.append(Step("output", 0, CONSTANT, (), (len(steps) - 1,)))
    return Problem(values, tuple(steps), sum(node.time_ns for node in nodes))


def peak_of(nodes: Nodes, schedule: list[int]) -> int:
    """The most bytes live at once where nodes are computed in the order of `schedule`, some of them several times.

    A tensor lives from its computation to the last reader before the node's next computation.
    """
    latest: dict[int, int] = {}
    last_read = list(range(len(schedule)))
    for at, node in enumerate(schedule):
        for read in nodes[node].reads:
            last_read[latest[read]] = at
        latest[node] = at
    live = [0] * (len(schedule) + 1)
    for at, node in enumerate(schedule):
        live[at] += nodes[node].nbytes
        live[last_read[at] + 1] -= nodes[node].nbytes
    most = now = 0
    for change in live:
        now += change
        most = max(most, now)
    return most
