"""The forecast of a rank against what ranks of gloo groups hold and measure: within 3 %."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from compile_remat.budget import MemoryBudget
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.rank_figures import RankForecast
from compile_remat.forecast.mesh.rank_forecast import forecast_rank
from compile_remat.forecast.target_step import Target
from tests.forecast.mesh import jobs
from tests.forecast.mesh.models import WIDE, sections, stack
from tests.ranks.processes import Ranks


def within_3_percent(expected: int) -> object:
    return pytest.approx(expected, rel=0.03)


def forecast_of(dp: int, tp: int, shard: str, budget: str = "max") -> RankForecast:
    layout = MeshLayout.parse(f"dp={dp},tp={tp}", shard)
    return forecast_rank(Builder(stack), Target("cpu", MemoryBudget.parse(budget)), layout)


MESHES = [
    (2, 1, "ddp"),
    (2, 1, "fsdp2"),
    (1, 2, "ddp"),
    (2, 2, "fsdp2"),
    pytest.param(2, 1, "fsdp2-whole", marks=pytest.mark.full),
    pytest.param(4, 1, "fsdp2", marks=pytest.mark.full),
    pytest.param(2, 2, "fsdp2-whole", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("dp", "tp", "shard"), MESHES)
def test_what_a_rank_holds(two: Ranks, four: Ranks, dp: int, tp: int, shard: str) -> None:
    found = forecast_of(dp, tp, shard)
    for real in (two if dp * tp == 2 else four)(jobs.real_rank, dp, tp, shard):
        assert real.parameter_bytes == within_3_percent(found.parameter_bytes)
        assert real.gradient_bytes == within_3_percent(found.gradient_bytes)
        assert real.optimizer_bytes == within_3_percent(found.optimizer_bytes)
        assert real.gathered_bytes == within_3_percent(found.gathered_bytes)


@pytest.mark.parametrize(
    ("dp", "tp", "shard", "budget"),
    [
        (1, 2, "fsdp2", "max"),
        pytest.param(2, 1, "fsdp2", "max", marks=pytest.mark.full),
        pytest.param(2, 2, "fsdp2", "max", marks=pytest.mark.full),
        pytest.param(2, 1, "ddp", "max", marks=pytest.mark.full),
        pytest.param(2, 1, "fsdp2-whole", "max", marks=pytest.mark.full),
        pytest.param(2, 1, "ddp", "min", marks=pytest.mark.full),
        pytest.param(2, 1, "fsdp2-whole", "min", marks=pytest.mark.full),
        pytest.param(1, 2, "ddp", "min", marks=pytest.mark.full),
    ],
)
def test_the_region_peak_of_its_graphs(two: Ranks, four: Ranks, dp: int, tp: int, shard: str, budget: str) -> None:
    with torch._dynamo.config.patch(optimize_ddp=False):  # the job compiles the module without DDP around it
        found = forecast_of(dp, tp, shard, budget)
    planned = found.graphs[1].plan.peak_bytes if shard == "fsdp2" else found.peak_bytes
    for measured in (two if dp * tp == 2 else four)(jobs.region_peak, dp, tp, shard, budget):
        assert measured == within_3_percent(planned)


BF16, FP32 = torch.bfloat16, torch.float32
MANY, FEW = (512, WIDE), (8, WIDE)
"""Rows and width: activations make the peak, or the wrapper and the optimizer do."""


@pytest.mark.parametrize(
    ("sizes", "shard", "reshard", "dtypes", "budget"),
    [
        (MANY, "fsdp2", None, (None, None), "max"),
        (MANY, "fsdp2", False, (None, None), "min"),
        (FEW, "fsdp2", None, (BF16, FP32), "max"),
        (FEW, "ddp", None, (None, None), "max"),
        pytest.param(MANY, "fsdp2", True, (None, None), "min", marks=pytest.mark.full),
        pytest.param(MANY, "fsdp2", None, (BF16, None), "max", marks=pytest.mark.full),
        pytest.param(FEW, "fsdp2", None, (BF16, None), "max", marks=pytest.mark.full),
        pytest.param(FEW, "fsdp2", False, (None, None), "max", marks=pytest.mark.full),
        pytest.param(MANY, "fsdp2-whole", None, (None, None), "max", marks=pytest.mark.full),
        pytest.param(MANY, "fsdp2-whole", None, (None, None), "min", marks=pytest.mark.full),
        pytest.param(FEW, "fsdp2-whole", True, (BF16, FP32), "max", marks=pytest.mark.full),
        pytest.param(MANY, "ddp", None, (None, None), "max", marks=pytest.mark.full),
        pytest.param(MANY, "ddp", None, (None, None), "min", marks=pytest.mark.full),
    ],
)
def test_the_sum_of_a_whole_step(
    two: Ranks, sizes: tuple[int, int], shard: str, reshard: bool | None, dtypes: jobs.Dtypes, budget: str
) -> None:
    names = {None: None, BF16: "bf16", FP32: "fp32"}
    layout = MeshLayout.parse("dp=2", shard, reshard, 8, *map(names.__getitem__, dtypes))
    found = forecast_rank(Builder(partial(sections, *sizes)), Target("cpu", MemoryBudget.parse(budget)), layout)
    for measured in two(jobs.whole_step, sizes, shard, reshard, dtypes, budget, timeout_s=300):
        assert min(measured) == within_3_percent(found.total_bytes)
