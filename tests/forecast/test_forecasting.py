"""Forecasts of training on a device that is not here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat import api
from compile_remat._torch.sizes import CUDA_BLOCK_BYTES
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.cost_models import load_device, op_kind
from compile_remat.errors import BudgetError, ConfigError, PlannerWarning, RematError
from compile_remat.forecast import target_step
from compile_remat.forecast.baselines import (
    ALL_MOVED,
    DEFAULT,
    EACH,
    INNER,
    INPUTS_MOVED,
    NOTHING,
    PRODUCTS,
    SOME,
    _entries_of,
    compare,
    hand_written,
    inner_blocks_of,
    layers_of,
    offloading,
)
from compile_remat.forecast.batch_scaling import BatchScaling, are_alike
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.device_choice import compare_devices
from compile_remat.forecast.fake_trace import trace
from compile_remat.forecast.forecasting import Forecast, forecast
from compile_remat.forecast.max_batch import MOST_SAMPLES, MaxBatch, _most
from compile_remat.forecast.target_step import Target, ready_on, step_of
from compile_remat.passes import Plan, Planner, timeline
from compile_remat.planning import joint_problem, pipeline
from tests import planned_models

OURS = "tests.planned_models"
H100 = Target("h100-sxm", estimate=True)


def llama(batch: int = 2) -> Builder:
    return Builder(f"{OURS}:llama", batch=batch, dtype="bf16")


@pytest.fixture(scope="module")
def found() -> Forecast:
    return forecast(llama(), replace(H100, budget=MemoryBudget.parse(0.7)), with_baselines=True)


def test_the_sum_is_what_lies_on_the_device(found: Forecast) -> None:
    parameters = sum(p.numel() for p in planned_models.Llama().parameters()) * 2
    assert found.parameter_bytes == found.gradient_bytes == parameters
    assert found.optimizer_bytes == 2 * parameters
    assert found.total_bytes == 3 * parameters + found.input_bytes + found.plan.peak_bytes
    assert found.limit_bytes == load_device("h100-sxm").memory_bytes - Reserve("percent", 5).of(85520809984) - 2 * (
        32 << 20
    )
    assert found.fits is True and found.peak_moment == "forward and backward"


@pytest.mark.parametrize(("optimizer", "takes"), [("adamw", True), ("sgd", True), ("none", False), ("1GiB", False)])
def test_gradients_and_the_optimizers_own_tensors_may_need_more_than_the_graph(optimizer: str, takes: bool) -> None:
    """AdamW and SGD as torch runs them on a GPU, for all parameters at once."""
    state = OptimizerState.parse(optimizer)
    result = forecast(Builder(wide, batch=1), replace(H100, optimizer=state))
    parameters = result.parameter_bytes
    workspace_bytes = parameters if takes else 0
    assert result.optimizer_workspace_bytes == workspace_bytes
    at_end_bytes = max(result.plan.peak_bytes, parameters + workspace_bytes)
    assert result.total_bytes == parameters + state.of(parameters) + result.input_bytes + at_end_bytes
    assert result.peak_moment == ("the optimizer's step" if takes else "forward and backward")
    limit_bytes = parameters + state.of(parameters) + at_end_bytes + 100_000
    tight = replace(H100, optimizer=state, capacity_bytes=limit_bytes + 2 * (32 << 20), reserve=Reserve("bytes", 0))
    found = forecast(Builder(wide, batch=1), tight).largest_batch
    assert found is not None and found.batch is not None and found.batch > 1
    assert found.total_bytes is not None and limit_bytes - 10_000 < found.total_bytes <= limit_bytes


def wide(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Far more parameters than activations."""
    return Mean(nn.Linear(1024, 1024)), (torch.zeros(batch, 1024),)


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh().mean()  # type: ignore[no-any-return]


def test_the_plan_is_within_the_budget_and_above_the_floor(found: Forecast) -> None:
    assert found.plan.budget_bytes is not None
    assert found.gradient_bytes < found.floor_bytes <= found.plan.peak_bytes <= found.plan.budget_bytes
    assert found.step_time_ns >= found.plan.once_time_ns > 0


def test_a_graph_is_prepared_once_for_a_budget_that_needs_no_plain_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph whose largest batch is sought is that of the plan."""
    builder, count = Builder(wide, batch=64), Counter[str]()

    def counted(*args: Any, **kwargs: Any) -> Any:
        count["prepared"] += 1
        return joint_problem.prepare(*args, **kwargs)

    for module in (target_step, pipeline):
        monkeypatch.setattr(module, "prepare", counted)
    lowest = forecast(builder, replace(H100, budget=MemoryBudget.parse("min")), with_max_batch=False)
    assert count["prepared"] == 1
    target = replace(H100, budget=MemoryBudget("bytes", lowest.plan.peak_bytes + 1_000_000))
    fitting = forecast(builder, target, with_max_batch=False)
    assert count["prepared"] == 2 and fitting.floor_bytes == lowest.plan.peak_bytes
    with_plain = forecast(builder, target, with_max_batch=False, with_plain=True)
    assert count["prepared"] == 4 and with_plain.plain_peak_bytes
    assert (with_plain.plan.saved, with_plain.plan.budget_bytes) == (fitting.plan.saved, fitting.plan.budget_bytes)


def test_a_search_that_ended_at_its_limit_of_work_is_said() -> None:
    target = replace(H100, budget=MemoryBudget.parse(0.6), time_limit=1e-9)
    with pytest.warns(PlannerWarning, match="ended at its limit of work"):
        limited = forecast(llama(), target, with_max_batch=False)
    assert "a larger one may find a faster plan" in limited.message and limited.plan.gap > 0.015


def test_json_holds_all_of_it(found: Forecast) -> None:
    data = json.loads(found.to_json())
    assert data["total_bytes"] == found.total_bytes and data["fits"] is True
    assert Plan.from_json(json.dumps(data["plan"])) == found.plan
    assert Plan.from_json(json.dumps(data["largest_batch"]["plan"])) == found.largest_batch.plan  # type: ignore[union-attr]
    assert [c["name"] for c in data["compared"]] == [c.name for c in found.compared]


# -- the largest batch --------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_the_largest_batch_fits_and_the_next_one_does_not(found: Forecast) -> None:
    largest = found.largest_batch
    assert largest is not None and largest.batch and largest.plan and found.limit_bytes
    assert largest.plan.is_feasible and largest.total_bytes is not None
    assert largest.total_bytes <= found.limit_bytes
    # A real trace at that batch: the plan holds there, and the plan of lowest peak is above the room one batch later.
    real = step_of(llama(largest.batch), H100)
    assert timeline(real.problem, largest.plan).peak_bytes == largest.plan.peak_bytes
    beyond = step_of(llama(largest.batch + max(1, largest.batch // 20)), H100)
    room = found.limit_bytes - 3 * found.parameter_bytes - beyond.input_bytes
    assert Planner(beyond.problem).lowest().peak_bytes > room


@pytest.mark.parametrize("limit", [1, 2, 3, 37, 64, 1000])
@pytest.mark.parametrize(
    "excess",
    [
        lambda b, limit: b - limit,
        lambda b, limit: 1000 * (b - limit) - (b != limit),  # exact nowhere
        lambda b, limit: max(b - 100_000, 10_000 * (b - limit)),  # flat, then steep
        lambda b, limit: 1 if b > limit else 0,
    ],
)
def test_the_search_finds_the_last_number_that_fits(excess: Callable[[int, int], int], limit: int) -> None:
    asked: list[int] = []

    def seen(b: int) -> int:
        asked.append(b)
        return excess(b, limit)

    last = next(b for b in range(limit, 4000) if excess(b + 1, limit) > 0)
    assert _most(1, seen) == last and _most(last, seen) == last
    assert len(asked) < 40


def test_a_straight_line_is_found_in_a_few_steps() -> None:
    asked: list[int] = []
    assert _most(1, lambda b: asked.append(b) or 7 * b - 6000) == 857  # type: ignore[func-returns-value]
    assert len(asked) <= 7


@pytest.mark.parametrize("excess", [lambda b: -1, lambda b: b - 10**12, lambda b: b - MOST_SAMPLES])
def test_the_search_ends_at_the_most_samples(excess: Callable[[int], int]) -> None:
    assert _most(1, excess) == _most(1000, excess) == _most(MOST_SAMPLES, excess) == MOST_SAMPLES
    assert _most(1, lambda b: b - MOST_SAMPLES + 1) == MOST_SAMPLES - 1


def test_nothing_fits_where_the_state_alone_is_too_large() -> None:
    result = forecast(llama(), replace(H100, optimizer=OptimizerState.parse("90GiB")))
    assert (
        result.largest_batch is not None and result.largest_batch.batch == 0 and "90.0 GiB" in result.largest_batch.why
    )
    assert result.fits is False and "lowest" in result.message


def test_a_problem_at_another_batch_is_what_a_trace_gives() -> None:
    steps = [step_of(llama(b), H100) for b in (2, 4, 7)]
    scaling = BatchScaling((2, 4), (steps[0], steps[1]))
    grown, real = scaling.at(7), steps[2].problem
    assert are_alike(grown, real) and not are_alike(replace(real, values=real.values[1:]), real)
    for name in ("nbytes", "transient_bytes", "workspace_bytes"):
        assert [getattr(v, name) for v in grown.values] == [getattr(v, name) for v in real.values]
        assert [getattr(s, name) for s in grown.steps] == [getattr(s, name) for s in real.steps]
    assert scaling.input_bytes_at(7) == steps[2].input_bytes
    assert grown.step_time_ns == pytest.approx(real.step_time_ns, rel=0.05)


# -- baselines ----------------------------------------------------------------------------------------------------------


def test_every_baseline_has_a_plan_at_its_peak(found: Forecast) -> None:
    assert found.message == ""
    names = {c.name for c in found.compared}
    assert {"nothing recomputed", "every layer checkpointed", "selective checkpoint, products saved"} <= names
    assert sum("torch's chooser" in name for name in names) == 5
    for compared in found.compared:
        assert compared.ours.peak_bytes <= compared.peak_bytes
        assert compared.ours.time_ns <= compared.time_ns
        assert compared.ours.bound_time_ns <= compared.ours.extra_time_ns
    peaks = [c.peak_bytes for c in found.compared]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("path", "entries"),
    [
        ("model.layers.3.mlp.up", ["model.layers.3"]),
        ("encoder.block.12.layer.0.SelfAttention", ["encoder.block.12", "encoder.block.12.layer.0"]),
        ("0.attention", ["0"]),
        ("layer1.4.conv2", ["layer1.4"]),
        ("model.head", []),
        ("", []),
    ],
)
def test_the_entries_of_lists_on_a_path(path: str, entries: list[str]) -> None:
    assert _entries_of(path) == entries


def test_blocks_of_levels_can_be_checkpointed_too() -> None:
    builder = Builder(f"{OURS}:diffusion", dtype="bf16")
    traced = trace(builder, load_device("h100-sxm"))
    ready = ready_on(traced, H100)
    problem, graph = ready.step.problem, ready.prepared.joint.module.graph
    masks = hand_written(problem, graph)
    levels, blocks = masks[EACH], masks[INNER]
    assert (blocks & ~levels).any()  # values from one block of a level to the next
    assert not (blocks & ~masks[NOTHING]).any()
    kinds = {node.name: op_kind(node) for node in graph.nodes}
    outer, inner = (set(filter(None, of(problem, kinds))) for of in (layers_of, inner_blocks_of))
    assert outer == {"down.0", "down.1", "middle.0", "middle.1", "up.0", "up.1"}
    assert {"down.0.blocks.0", "down.0.attentions.0", "up.1.blocks.1"} <= inner and not inner & {"down.0", "up.0"}


def test_experts_are_products_that_selective_checkpointing_saves() -> None:
    builder = Builder(f"{OURS}:experts", dtype="bf16")
    traced = trace(builder, load_device("h100-sxm"))
    ready = ready_on(traced, H100)
    problem, graph = ready.step.problem, ready.prepared.joint.module.graph
    masks = hand_written(problem, graph)
    grouped = [k for k, v in enumerate(problem.values) if v.name.startswith("_grouped_mm") and v.in_forward]
    assert len(grouped) == 2 * 2 and masks[PRODUCTS][grouped].all() and not masks[EACH][grouped].any()
    found = forecast(builder, replace(H100, budget=MemoryBudget.parse("min")), with_baselines=True)
    assert {EACH, SOME, PRODUCTS} < {c.name for c in found.compared}
    assert found.largest_batch is not None and found.largest_batch.batch


def test_a_checkpointed_layer_keeps_what_others_read() -> None:
    traced = trace(llama(), load_device("h100-sxm"))
    ready = ready_on(traced, H100)
    problem, graph = ready.step.problem, ready.prepared.joint.module.graph
    masks = hand_written(problem, graph)
    every, saved = masks["every layer checkpointed"], masks["nothing recomputed"]
    layers = layers_of(problem, {v.name: "matmul" for v in problem.values if v.kernel == "extern"})  # type: ignore[misc]
    assert {layer for layer in layers if layer} == {"layers.0", "layers.1"}
    kept = [problem.values[v].name for v in range(len(layers)) if every[v] and layers[v] == "layers.0"]
    assert len(kept) == 1 and kept[0].startswith("add")  # the residual sum that the next layer reads
    assert every.sum() < masks["selective checkpoint, products saved"].sum() < saved.sum()


@pytest.mark.full
def test_rows_of_offload_move_block_inputs_and_all_tensors_beside_ours() -> None:
    ready = ready_on(trace(llama(1024), load_device("h100-sxm")), replace(H100, offload="auto"))
    problem, graph = ready.step.problem, ready.prepared.joint.module.graph
    masks = {name: mask for name, mask in hand_written(problem, graph).items() if name in (EACH, NOTHING)}
    moved = offloading(problem, graph, {**masks, DEFAULT: masks[NOTHING]})
    planner = ready.planner
    rows = {each.name: each for each in compare(planner, masks, moved=moved)}
    assert set(rows) == {*masks, INPUTS_MOVED, ALL_MOVED}
    buffers = [each for each in planner.curve(masks[EACH]).movable if moved[INPUTS_MOVED][1][each.value]]
    assert [each.name.partition("_")[0] for each in buffers] == ["embedding", "add"]  # what each of two layers is given
    assert rows[INPUTS_MOVED].peak_bytes < rows[EACH].peak_bytes and rows[INPUTS_MOVED].time_ns > rows[EACH].time_ns
    assert rows[ALL_MOVED].peak_bytes < rows[NOTHING].peak_bytes and rows[ALL_MOVED].time_ns > rows[NOTHING].time_ns
    for row in rows.values():
        assert row.ours.peak_bytes <= row.peak_bytes and row.ours.time_ns <= row.time_ns
    assert {each.name for each in compare(Planner(problem), masks, moved=moved)} == set(masks)  # no link


# -- what does not belong -----------------------------------------------------------------------------------------------


def test_nothing_of_a_cpu_enters_a_plan_for_a_gpu() -> None:
    builder = Builder(f"{OURS}:convolution", dtype="bf16")
    problem = step_of(builder, H100).problem
    nodes = (*problem.values, *problem.steps)
    assert not any(n.workspace_bytes or n.is_channels_last for n in nodes)
    assert not any(s.held_bytes for s in problem.steps)
    on_cpu = step_of(replace(builder, dtype="fp32"), replace(H100, device="cpu")).problem
    assert any(v.is_channels_last for v in on_cpu.values)


@pytest.mark.parametrize("budget", ["max", "min"])
def test_under_max_convolutions_are_torchs_own_and_the_floor_is_that_of_budgets(budget: str) -> None:
    builder, target = (
        Builder(f"{OURS}:convolution", dtype="fp32"),
        Target("cpu", MemoryBudget.parse(budget), estimate=True),
    )
    model, images = planned_models.convolution()
    (planned,) = api.look(model, [images], memory_budget=budget, device="cpu", capacity="100GiB")
    found = forecast(builder, target, with_max_batch=False)
    assert found.plan.problem_key == planned.problem.key() and found.plan.peak_bytes == planned.plan.peak_bytes
    assert (found.plan.problem_key == step_of(builder, target).problem.key()) is (budget == "min")
    assert found.floor_bytes == forecast(builder, replace(target, budget=MemoryBudget.parse("min"))).plan.peak_bytes


def test_a_depthwise_convolution_is_split_where_the_device_has_fast_kernels_for_it() -> None:
    builder = Builder(f"{OURS}:depthwise", dtype="bf16")
    names = {
        target.device: [s.name for s in step_of(builder, target).problem.steps] for target in (H100, Target("cpu"))
    }
    assert not any(name.startswith("convolution_default") for name in names["h100-sxm"])
    assert any(name.startswith("convolution_default") for name in names["cpu"])


def test_the_call_for_people_takes_names(found: Forecast) -> None:
    settings = {"device": "h100-sxm", "memory_budget": 0.7, "batch": 2, "dtype": "bf16", "estimate": True}
    assert compile_remat.plan(f"{OURS}:llama", **settings) == found.plan
    with pytest.raises(ConfigError, match="needs the name of a device"):
        compile_remat.plan(f"{OURS}:llama")


def test_a_budget_below_the_floor_is_an_error() -> None:
    with pytest.raises(BudgetError):
        forecast(llama(), replace(H100, budget=MemoryBudget("bytes", 100_000)), with_max_batch=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broken", "falls into 2 graphs"),
        ("frozen", "has no graph with a backward"),
        ("failing", "cannot be traced without data"),
    ],
)
def test_what_cannot_be_traced_is_said(name: str, text: str) -> None:
    with pytest.raises(RematError, match=text):
        trace(Builder(f"{OURS}:{name}"), load_device("h100-sxm"))


def test_without_a_capacity_the_plan_is_that_of_max() -> None:
    result = forecast(llama(), Target("cpu", estimate=True))
    assert result.limit_bytes is None and result.fits is None and result.largest_batch is None
    fastest = forecast(llama(), Target("cpu", budget=MemoryBudget("max"), estimate=True))
    assert result.plan.saved == fastest.plan.saved


# -- on a GPU -----------------------------------------------------------------------------------------------------------


TEMPORARIES = 16
"""More buffers than these models have at once beside what is saved."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama", "llama_with_dropout", "attention_of_odd_heads", "convolution"])
def test_a_forecast_has_the_bytes_of_a_trace_on_a_gpu(name: str) -> None:
    """A forecast leaves out the rounding to blocks by the GPU's allocator: those bytes do not grow with the batch."""
    builder = Builder(f"{OURS}:{name}", dtype="bf16")
    planned = forecast(builder, replace(H100, budget=MemoryBudget("max")), with_max_batch=False).plan
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, inputs = builder.build()
    finally:
        torch.set_default_dtype(torch.float32)
    on_gpu = [value.cuda() for value in inputs]
    seen = api.look(model.cuda(), on_gpu, device="h100-sxm", memory_budget="max")[0].plan
    assert 0 <= seen.saved_bytes - planned.saved_bytes < CUDA_BLOCK_BYTES * len(seen.saved)
    assert abs(seen.peak_bytes - planned.peak_bytes) < CUDA_BLOCK_BYTES * (len(seen.saved) + TEMPORARIES)


def test_a_larger_batch_that_cannot_be_built_leaves_the_plan() -> None:
    def build(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
        if batch > 15:
            raise ValueError("too many\nfor this model")
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), (torch.randn(batch, 16),)

    result = forecast(Builder(build), Target("l4", estimate=True))
    assert result.plan.peak_bytes > 0 and result.fits is True
    assert result.largest_batch == MaxBatch(None, why="ValueError: too many")
    (row,) = compare_devices(Builder(build), [Target("l4")])
    assert row.plan.saved == result.plan.saved and row.largest == result.largest_batch
    with pytest.raises(ValueError, match="too many"):
        compile_remat.largest_batch(build, device="l4")


def test_what_is_compiled_stays_compiled() -> None:
    """A callback asks for the largest batch while a model trains."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.body(x)
            return found

    def build(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
        return Net(), (torch.randn(batch, 16),)

    compiled: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(gm)
        return gm.forward

    model, inputs = build()
    call = torch.compile(model, backend=backend)
    call(*inputs)
    assert compile_remat.largest_batch(build, device="l4").batch > 8
    call(*inputs)
    assert len(compiled) == 1
