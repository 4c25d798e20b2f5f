"""What plain torch.compile saves, by our own max-flow: the same cut as networkx's, the same nodes as torch's."""

from __future__ import annotations

import math
import random
from typing import Any

import networkx as nx
import pytest

from benchmarks import models
from compile_remat._torch import joint_graph, plain_choice
from compile_remat.api import look
from compile_remat.planning import joint_planning


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
    ours, theirs = plain_choice._Network(), nx.DiGraph()
    for (tail, head), capacity in network(seed).items():
        ours.add_edge(tail, head, capacity=capacity, reason="a test")
        theirs.add_edge(tail, head, capacity=capacity)
    assert plain_choice._minimum_cut(ours, "source", "sink") == nx.minimum_cut(theirs, "source", "sink")


def test_a_path_without_limits_has_no_cut() -> None:
    ours = plain_choice._Network()
    ours.add_edge("source", "a", capacity=math.inf)
    ours.add_edge("a", "sink", capacity=math.inf)
    ours.add_edge("source", "sink", capacity=5)
    with pytest.raises(plain_choice._Unbounded):
        plain_choice._minimum_cut(ours, "source", "sink")


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "recurrent"])
def test_the_nodes_are_those_of_torchs_chooser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 18 models at full size: `python -m benchmarks.plain`."""
    chosen = []

    def both(joint: Any) -> Any:
        joint_graph.mark_distances(joint)
        ours = list(plain_choice._choose(joint.module.graph, joint.info, memory_budget=1.0))
        chosen.append((ours, joint_graph.torch_choice(joint)))
        return ours

    monkeypatch.setattr(joint_planning, "plain_choice", both)
    case = models.build(name, scale=models.TOY_SCALE)
    look(case.module, case.inputs, memory_budget="max", device="cpu")
    ((ours, torchs),) = chosen
    assert ours == torchs and ours


def test_where_torch_builds_another_network_its_own_chooser_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_choice._Network, "add_edge", None)
    case = models.build("gpt", scale=models.TOY_SCALE)
    (planned,) = look(case.module, case.inputs, memory_budget="max", device="cpu")
    assert planned.problem.reference
