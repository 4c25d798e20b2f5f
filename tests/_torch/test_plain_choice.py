"""The values that plain torch.compile saves, by our own max-flow: the nodes that torch's chooser takes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import models
from compile_remat._torch import joint_graph
from compile_remat._util import max_flow
from compile_remat.api import look

BUDGETS = (1.0, 0.4, 0.2)
HAS_OWN_CUT = hasattr(joint_graph.P, "minimum_cut")


@pytest.mark.skipif(HAS_OWN_CUT, reason="this torch has a fast cut, and is asked itself")
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "recurrent"])
def test_the_nodes_are_those_of_torchs_chooser(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, priced = [], []
    price = joint_graph.P.estimate_runtime

    def noting(node: Any) -> Any:
        priced.append(node)
        return price(node)

    def both(joint: Any, budgets: Any) -> Any:
        joint_graph.mark_distances(joint)
        with monkeypatch.context() as patched:
            patched.setattr(joint_graph.P, "estimate_runtime", noting)
            choose = joint_graph._chooser()
        ours = [list(choose(joint.module.graph, joint.info, memory_budget=budget)) for budget in BUDGETS]
        chosen.append((ours, [joint_graph.torch_choice(joint, budget) for budget in BUDGETS]))
        assert budgets == BUDGETS[:1]
        return ours[:1]

    monkeypatch.setattr(joint_graph, "torch_choices", both)
    case = models.build(name, scale=models.TOY_SCALE)
    look(case.module, case.inputs, memory_budget="max", device="cpu")
    ((ours, torchs),) = chosen
    assert ours == torchs and all(ours)
    assert len(priced) == len(set(priced)) > 0


def test_where_torch_builds_another_network_its_own_chooser_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_flow.DiGraph, "add_edge", None)
    case = models.build("gpt", scale=models.TOY_SCALE)
    (planned,) = look(case.module, case.inputs, memory_budget="max", device="cpu")
    assert planned.problem.reference
