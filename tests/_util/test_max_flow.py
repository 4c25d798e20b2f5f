"""A minimum cut like that of networkx."""

from __future__ import annotations

import math
import random

import networkx as nx
import pytest

from compile_remat._util import max_flow


def network(seed: int) -> dict[tuple[str, str], float]:
    """Capacities of a random layered network, up to 2**45, some of them unlimited."""
    rng = random.Random(seed)
    names = ["source", *(f"n{k}" for k in range(rng.randrange(2, 40))), "sink"]
    arcs: dict[tuple[str, str], float] = {}
    for head in range(1, len(names)):
        for tail in rng.sample(range(head), min(head, 3)):
            arcs[names[tail], names[head]] = rng.choice([rng.randrange(100), rng.randrange(1 << 45), 7, 7])
    for tail, head in rng.sample(sorted(arcs), len(arcs) // 4):
        if tail != "source" and head != "sink":
            arcs[tail, head] = math.inf
    return arcs


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_that_of_networkx(seed: int) -> None:
    ours, theirs = max_flow.DiGraph(), nx.DiGraph()
    for (tail, head), capacity in network(seed).items():
        ours.add_edge(tail, head, capacity=capacity, reason="a test")
        theirs.add_edge(tail, head, capacity=capacity)
    assert max_flow.minimum_cut(ours, "source", "sink") == nx.minimum_cut(theirs, "source", "sink")


def test_a_path_without_limits_has_no_cut() -> None:
    ours = max_flow.DiGraph()
    ours.add_edge("source", "a", capacity=math.inf)
    ours.add_edge("a", "sink", capacity=math.inf)
    ours.add_edge("source", "sink", capacity=5)
    with pytest.raises(max_flow.NetworkXUnbounded):
        max_flow.minimum_cut(ours, "source", "sink")
