"""The memory that one rank of a mesh holds, without the other ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.budget import MemoryBudget, Reserve
from compile_remat.cost_models import CollectiveKind, load_device
from compile_remat.errors import BudgetError, ConfigError, DeviceError, RematError, SharedBudgetError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.forecasting import forecast
from compile_remat.forecast.mesh.communication import links_of
from compile_remat.forecast.mesh.layout import MeshLayout
from compile_remat.forecast.mesh.rank_figures import RankForecast
from compile_remat.forecast.mesh.rank_forecast import forecast_rank
from compile_remat.forecast.target_step import Target
from compile_remat.planning.settings import SHARES_BUDGET
from tests.forecast.mesh.models import Net, net, sections, stack
from tests.ranks.models import Block

H100 = Target("h100-sxm")
STACK, NET = Builder(stack), Builder(net)


def on(mesh: str, shard: str = "ddp", builder: Builder = NET, target: Target = H100, **layout: Any) -> RankForecast:
    return forecast_rank(builder, target, MeshLayout.parse(mesh, shard, **layout))


@pytest.fixture(scope="module")
def by_blocks() -> RankForecast:
    return on("dp=4", "fsdp2")


def nbytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def test_blocks_are_planned_once_and_counted(by_blocks: RankForecast) -> None:
    assert [(g.name, g.calls) for g in by_blocks.graphs] == [("", 1), ("blocks.0", 3), ("", 1)]
    assert by_blocks.num_ranks == 4 and by_blocks.fits is True
    before, block, behind = (g.plan for g in by_blocks.graphs)
    head_bytes = nbytes(Net().head)  # its gradient waits, with the embedding's, for the end of the step
    held = before.held_bytes + 2 * block.held_bytes
    assert by_blocks.peak_bytes >= held + block.peak_bytes + head_bytes
    assert by_blocks.peak_bytes >= before.held_bytes + 3 * block.held_bytes + behind.peak_bytes


def test_parts_of_parameters_are_a_rank_s_own(by_blocks: RankForecast) -> None:
    whole = nbytes(Net())
    assert by_blocks.parameter_bytes == by_blocks.gradient_bytes == pytest.approx(whole / 4, rel=0.01)
    assert by_blocks.optimizer_bytes == 2 * by_blocks.gradient_bytes
    model_s_own = nbytes(Net()) - 3 * nbytes(Block())
    # The model's own group, and a block both flat and copied out, beside the flat copy of the block before.
    assert by_blocks.gathered_bytes == model_s_own + 3 * nbytes(Block())


def test_the_sum_is_that_of_one_moment(by_blocks: RankForecast) -> None:
    fixed_bytes = 3 * by_blocks.parameter_bytes + by_blocks.input_bytes
    moment = by_blocks.peak_moment
    assert by_blocks.total_bytes == fixed_bytes + moment.graph_bytes + moment.wrapper_bytes
    assert by_blocks.total_bytes < fixed_bytes + by_blocks.beside_bytes + by_blocks.peak_bytes
    assert moment.graph_bytes <= by_blocks.peak_bytes and moment.wrapper_bytes <= by_blocks.beside_bytes
    assert str(moment) == f"{moment.at}, {moment.where}"


def test_auto_allows_for_the_wrapper_where_it_holds_it() -> None:
    """A device on which the step fits, but not the two peaks as if they came together."""
    free = on("dp=4", "fsdp2", STACK)
    fixed_bytes = free.total_bytes - free.peak_moment.nbytes
    limit_bytes = fixed_bytes + free.beside_bytes + free.peak_bytes - 1
    target = replace(H100, capacity_bytes=limit_bytes, reserve=Reserve("bytes", 0))
    target = replace(target, capacity_bytes=2 * limit_bytes - (target.limit_bytes or 0))  # cuBLAS has workspaces
    assert target.limit_bytes == limit_bytes
    found = on("dp=4", "fsdp2", STACK, target)
    assert found.fits and found.extra_time_ns == free.extra_time_ns and not found.message
    assert found.peak_bytes == free.peak_bytes


def test_mixed_precision_gathers_and_computes_in_another_type_than_the_shards_are_in(by_blocks: RankForecast) -> None:
    mixed = on("dp=4", "fsdp2", param_dtype="bf16")
    assert mixed.param_dtype == "bf16" and mixed.parameter_bytes == by_blocks.parameter_bytes
    assert mixed.gradient_bytes == by_blocks.gradient_bytes and mixed.optimizer_bytes == by_blocks.optimizer_bytes
    assert mixed.gathered_bytes == by_blocks.gathered_bytes // 2
    assert 0.4 * by_blocks.peak_bytes < mixed.peak_bytes < 0.75 * by_blocks.peak_bytes  # the loss is in float32
    in_float32 = on("dp=4", "fsdp2", param_dtype="bf16", reduce_dtype="fp32")
    assert mixed.beside_bytes < in_float32.beside_bytes
    assert in_float32.collective_time_ns > mixed.collective_time_ns  # type: ignore[operator]


def test_keeping_what_is_gathered_costs_memory_and_spares_time(by_blocks: RankForecast) -> None:
    kept = on("dp=4", "fsdp2", reshard=False)
    assert kept.gathered_bytes > by_blocks.gathered_bytes
    assert kept.collective_time_ns is not None and by_blocks.collective_time_ns is not None
    assert kept.collective_time_ns < by_blocks.collective_time_ns
    assert kept.peak_bytes == by_blocks.peak_bytes


def test_one_rank_is_the_forecast_of_one_device() -> None:
    alone, one = forecast(STACK, replace(H100, estimate=True), with_max_batch=False), on("dp=1", builder=STACK)
    assert one.peak_bytes == alone.plan.peak_bytes and one.graphs[0].plan.saved == alone.plan.saved
    assert one.total_bytes == alone.total_bytes and one.floor_bytes == alone.floor_bytes
    assert one.collective_time_ns == 0 and one.step_time_ns == one.kernel_time_ns == alone.step_time_ns


def test_ddp_has_all_parameters_and_buckets_and_reduces_at_the_end() -> None:
    found, links = on("dp=4"), links_of(load_device("h100-sxm"), MeshLayout(dp=4))
    assert links is not None
    assert found.parameter_bytes == found.gradient_bytes == found.beside_bytes == nbytes(Net())
    assert found.collective_time_ns == found.exposed_time_ns
    assert found.collective_time_ns == links.time_ns(CollectiveKind.ALL_REDUCE, nbytes(Net()), range(4))


def test_ddp_cuts_the_step_at_its_buckets_and_reduces_beside_the_backward() -> None:
    found, links = on("dp=4", builder=Builder(sections)), links_of(load_device("h100-sxm"), MeshLayout(dp=4))
    assert links is not None and [graph.name for graph in found.graphs] == ["piece 1", "piece 2"]
    at_once = links.time_ns(CollectiveKind.ALL_REDUCE, nbytes(sections()[0]), range(4))
    assert (
        found.collective_time_ns is not None and at_once < found.collective_time_ns < 2 * at_once
    )  # twice the latency
    assert found.exposed_time_ns is not None and 0 < found.exposed_time_ns < found.collective_time_ns


LARGE = Builder(stack, batch=16384)
TO_HOST = replace(H100, budget=MemoryBudget("min"), offload="auto")


@pytest.fixture(scope="module")
def moving() -> RankForecast:
    return on("dp=4", "fsdp2-whole", LARGE, TO_HOST)


def test_each_rank_sends_its_own_tensors_to_its_node_s_host(moving: RankForecast) -> None:
    kept = on("dp=4", "fsdp2-whole", LARGE, replace(TO_HOST, offload="off"))
    (plan,) = [graph.plan for graph in moving.graphs]
    assert plan.offloaded and moving.peak_bytes < kept.peak_bytes and moving.total_bytes < kept.total_bytes
    assert moving.kernel_time_ns == plan.time_ns > plan.stall_time_ns > 0
    assert moving.node_ranks == 4 and moving.node_host_bytes == 4 * moving.host_bytes == 4 * plan.host_bytes
    assert json.loads(moving.to_json())["node_host_bytes"] == moving.node_host_bytes


@pytest.mark.full
def test_the_host_s_memory_is_divided_among_the_ranks_of_a_node(moving: RankForecast) -> None:
    less = replace(TO_HOST, host_bytes=moving.node_host_bytes // 2)
    found = on("dp=4", "fsdp2-whole", LARGE, less)
    assert 0 < found.node_host_bytes <= moving.node_host_bytes // 2 and found.peak_bytes > moving.peak_bytes
    enough = replace(less, host_bytes=moving.host_bytes)
    one = on("dp=4", "fsdp2-whole", LARGE, enough, node_size=1)
    assert one.peak_bytes == moving.peak_bytes and one.node_host_bytes == moving.host_bytes


def test_graphs_that_share_a_budget_say_that_they_move_nothing() -> None:
    found = on("dp=4", "fsdp2", LARGE, TO_HOST)
    assert found.host_bytes == 0 and found.message == SHARES_BUDGET
    assert on("dp=4", "fsdp2", LARGE, replace(TO_HOST, budget=MemoryBudget("max"))).message == ""


def test_tensor_parallel_ranks_have_parts_of_products_and_wait_for_each_other() -> None:
    one, two = on("dp=1", builder=STACK), on("tp=2", builder=STACK)
    biases = 3 * (2 + 1) * 128 * 4  # norms, and what is added behind the sum, are on both
    assert two.parameter_bytes == (one.parameter_bytes - biases) // 2 + biases
    assert two.peak_bytes < one.peak_bytes and two.beside_bytes == 0
    links = links_of(load_device("h100-sxm"), MeshLayout(tp=2))
    assert links is not None
    # One sum in each block's forward, and one in its backward.
    assert two.collective_time_ns == 6 * links.time_ns(CollectiveKind.ALL_REDUCE, 512 * 128 * 4, range(2))
    assert two.exposed_time_ns == two.collective_time_ns


@pytest.mark.parametrize("shard", ["ddp", "fsdp2", "fsdp2-whole"])
def test_both_kinds_of_parallelism_together(shard: str) -> None:
    tp, both = on("tp=2", builder=STACK), on("dp=4,tp=2", shard, STACK)
    assert both.parameter_bytes == tp.parameter_bytes // (1 if shard == "ddp" else 4)
    assert both.collective_time_ns is not None and tp.collective_time_ns is not None
    assert both.collective_time_ns > tp.collective_time_ns
    assert len(both.graphs) == (3 if shard == "fsdp2" else 1)


def test_more_ranks_than_a_node_holds_are_slower() -> None:
    near, far = on("dp=8", "fsdp2"), on("dp=8", "fsdp2", node_size=4)
    assert near.collective_time_ns is not None and far.collective_time_ns is not None
    assert far.collective_time_ns > near.collective_time_ns and far.peak_bytes == near.peak_bytes
    with pytest.raises(DeviceError, match="no network is known"):
        on("dp=16", "fsdp2", target=Target("l40s"))
    layout = MeshLayout.parse("dp=16", "fsdp2")
    assert forecast_rank(NET, Target("l40s"), layout, "infiniband-hdr").collective_time_ns
    with pytest.raises(DeviceError, match="no such link"):
        forecast_rank(NET, Target("l40s"), layout, "infiniband")


def test_without_links_collectives_have_no_price() -> None:
    found = on("dp=4", "fsdp2", target=Target("cpu"))
    assert found.collective_time_ns is None and found.exposed_time_ns is None
    assert found.step_time_ns == found.kernel_time_ns > 0
    assert found.limit_bytes is None and found.fits is None


def test_budgets_are_the_whole_step_s(by_blocks: RankForecast) -> None:
    low = on("dp=4", "fsdp2", target=replace(H100, budget=MemoryBudget("min")))
    assert low.peak_bytes == low.floor_bytes == by_blocks.floor_bytes < by_blocks.peak_bytes
    assert low.extra_time_ns > by_blocks.extra_time_ns
    middle = (low.peak_bytes + by_blocks.peak_bytes) // 2
    given = on("dp=4", "fsdp2", target=replace(H100, budget=MemoryBudget("bytes", middle)))
    assert low.peak_bytes <= given.peak_bytes <= given.budget_bytes == middle  # type: ignore[operator]
    half = on("dp=4", "fsdp2", target=replace(H100, budget=MemoryBudget.parse(0.8)))
    assert half.plain_peak_bytes and half.peak_bytes <= 0.8 * half.plain_peak_bytes
    fastest = on("dp=4", "fsdp2", target=replace(H100, budget=MemoryBudget("max")))
    assert fastest.peak_bytes >= low.peak_bytes and fastest.floor_bytes == low.floor_bytes


def test_a_budget_below_the_floor_is_an_error_and_what_does_not_fit_is_said() -> None:
    with pytest.raises(SharedBudgetError):
        on("dp=4", "fsdp2", target=replace(H100, budget=MemoryBudget("bytes", 10_000)))
    with pytest.raises(BudgetError):
        on("dp=4", target=replace(H100, budget=MemoryBudget("bytes", 10_000)))
    small = on("dp=4", "fsdp2", target=replace(H100, capacity_bytes=1 << 20))
    assert small.fits is False and "runs of compiled graphs need" in small.message


def test_the_call_for_people(by_blocks: RankForecast) -> None:
    found = compile_remat.plan_rank(net, "dp=4", "fsdp2", device="h100-sxm", optimizer_state="adamw")
    assert replace(found, seconds=0) == replace(by_blocks, seconds=0)
    data = json.loads(found.to_json())
    assert data["total_bytes"] == found.total_bytes and data["fits"] is True
    assert [g["calls"] for g in data["graphs"]] == [1, 3, 1] and data["graphs"][1]["plan"]["peak_bytes"]
    with pytest.raises(ConfigError, match="needs the name of a device"):
        compile_remat.plan_rank(net, "dp=4")


class Uncalled(Net):
    """Runs the layers of its blocks, and not the blocks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.enter(tokens)
        for block in self.blocks:
            x = block.down(block.up(x))
        return self.head(x).square().mean()


class Plain(nn.Sequential):
    """One layer after the other."""


def uncalled(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    model = Uncalled()
    model.blocks[1].requires_grad_(False)
    model.enter.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model, (torch.zeros(batch, dtype=torch.int64),)


def plain(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Plain(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(batch, 8),)


def broken(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    class Broken(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.enter(tokens)
            torch._dynamo.graph_break()
            return self.head(x).square().mean()

    return Broken(), (torch.zeros(batch, dtype=torch.int64),)


@pytest.mark.parametrize(
    ("builder", "mesh", "shard", "error", "text"),
    [
        (net, "tp=2", "ddp", ConfigError, "shards no parameter"),
        (plain, "dp=2", "fsdp2", ConfigError, "has no list of blocks"),
        (uncalled, "dp=2", "fsdp2", RematError, "block blocks.0 is not called as a module"),
        (broken, "dp=2", "ddp", RematError, "falls into 2 graphs"),
    ],
)
def test_what_cannot_be_planned_is_said(builder: Any, mesh: str, shard: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        on(mesh, shard, Builder(builder))
    assert not torch.distributed.is_initialized()


def test_a_rank_cannot_be_planned_inside_a_process_group() -> None:
    from compile_remat._torch.ranks.fake_group import fake_mesh

    with fake_mesh({"dp": 2}), pytest.raises(ConfigError, match="plan in another process"):
        on("dp=4")
