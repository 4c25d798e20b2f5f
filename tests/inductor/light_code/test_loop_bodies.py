"""Copies of the bodies of loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compile_remat.inductor.light_code import reading
from compile_remat.inductor.light_code.kernels import LOADS, STORES, accessed
from compile_remat.inductor.light_code.loop_bodies import copied, nodes_in
from tests.inductor.light_code.emitting import compiled


def test_a_copy_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, int, bool]] = []
    read = reading.read

    def look(graph: Any) -> Any:
        for node in nodes_in(graph.scheduler.nodes):
            if accesses := hasattr(node, "_body") and accessed(node, (*LOADS, *STORES)):
                body, before = copied(node._body), str(node._body.root_block.graph)
                alike = str(body.root_block.graph) == before
                body.root_block.graph.erase_node(next(reversed(body.root_block.graph.nodes)))
                seen.append((before, str(node._body.root_block.graph), len(accesses), alike))
        return read(graph)

    monkeypatch.setattr(reading, "read", look)
    compiled(lambda x: torch.where(x > 0, x.sin(), x.exp()).sum(), (torch.randn(8, 8, requires_grad=True),)).check()
    assert seen
    for before, after, accesses, alike in seen:
        assert before == after and accesses and alike
