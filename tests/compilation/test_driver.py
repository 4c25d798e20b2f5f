"""The costs of the rounds of one compilation: graphs that are lowered, and kernels that are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering

from compile_remat.backend import remat
from compile_remat.compilation.readings import PlanRefused
from compile_remat.compilation.region_run import RegionRun
from compile_remat.compilation.rounds import Rounds
from compile_remat.inductor.cpp_kernels import building
from compile_remat.inductor.cpp_kernels.unit import Kernel
from compile_remat.planning.request import FitBelow


class Compiler:
    """Counts graphs that are lowered and kernels that are handed to the C++ compiler, which gets none.

    Attributes:
        lowered: Graphs so far.
        built: Kernels so far.
        seen: Number of kernels built by the end of each round.
        vector_bits: Inductor's option for the length of vectors, as the kernels are built.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
        self.lowered, self.built, self.seen = 0, 0, list[int]()
        self.vector_bits = set[int | None]()
        run = GraphLowering.run

        def lower(graph: GraphLowering, *inputs: Any) -> Any:
            self.lowered += 1
            return run(graph, *inputs)

        def build(keys: dict[Kernel, str]) -> None:
            self.built += len(keys)
            self.vector_bits.add(inductor_config.cpp.simdlen)
            building._functions.update(dict.fromkeys(keys.values(), lambda *arguments: None))

        def refuse(rounds: Rounds, reports: Sequence[Any], run: RegionRun) -> None:
            self.seen.append(self.built)
            if len(self.seen) <= refused:
                request = FitBelow(int(0.9 * reports[0].plan.peak_bytes))
                rounds.partitioner = replace(rounds.partitioner, request=request)
                raise PlanRefused
            rounds.is_settled = True  # its code is not judged again

        monkeypatch.setattr(GraphLowering, "run", lower)
        monkeypatch.setattr(building, "_build_missing", build)
        monkeypatch.setattr(building, "_functions", {})
        monkeypatch.setattr(building, "_function_in_cache", lambda key: None)
        monkeypatch.setattr(Rounds, "judge", refuse)


@pytest.mark.full
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_refused_round_builds_nothing_and_an_accepted_one_is_lowered_once(
    own_caches: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    compiler = Compiler(monkeypatch, refused)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(4)])
    step = torch.compile(model, backend=remat, options={"memory_budget": 0.8})
    for _ in range(2):
        step(torch.randn(256, 32)).sum().backward()
    assert compiler.seen == [0] * (refused + 1)
    assert compiler.lowered == 2 * (refused + 1) + 2, "forward and backward of each plan, and of plain torch.compile"
    assert compiler.built > 4


def test_kernels_are_built_under_the_options_that_their_code_is_made_for(
    own_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code with vectors of 256 bits, built for 512, writes behind the end of its buffers."""
    compiler = Compiler(monkeypatch, refused=1)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    options = {"memory_budget": 0.8, "cpp.simdlen": 256}
    torch.compile(model, backend=remat, options=options)(torch.randn(256, 32)).sum().backward()
    assert compiler.seen == [0, 0] and compiler.built
    assert compiler.vector_bits == {256}
