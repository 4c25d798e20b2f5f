"""Pins of the user, and torch's own ratios: the plan that a graph gets, and the message if no plan can follow them."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import compile_remat
from compile_remat import partition
from compile_remat._util.units import format_bytes
from compile_remat.api import look
from compile_remat.backend import remat
from compile_remat.config import RematConfig
from compile_remat.errors import BudgetError, ConfigError, PlannerWarning, SettingWarning, TagConflictError
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import Planner, Status
from compile_remat.passes.problem.problem import FREE, MUST_RECOMPUTE, MUST_SAVE, PREFER_RECOMPUTE, RECOMPUTE, SAVE
from compile_remat.planning import plain_peaks
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.settings import settings_for
from compile_remat.runtime.process_state import clear_process_state
from tests.planning.test_joint_planning import Traced, gradients

BUDGETS = ("max", "1GiB", 0.6, 0.4, "min")
ATEN = torch.ops.aten
REGION = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
needs_regions = pytest.mark.skipif(REGION is None, reason="this torch has no region_activation_memory_budget")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    torch.compiler.reset()
    clear_process_state()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Two matmuls, each followed by something that is cheap to compute again."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.down(torch.sin(self.up(x))))


class Blocks(nn.Module):
    """Blocks, each in a region of its own or all in one, under a policy; without one nothing is checkpointed."""

    def __init__(self, policy: Any = None, count: int = 4, one_region: bool = False, **keywords: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(count)])
        self.policy, self.one_region = policy, one_region
        self.keywords = keywords or {"use_reentrant": False}

    def forward(self, x: Tensor) -> Tensor:
        if self.one_region:
            return torch.sin(self.region(self.chain, x))
        for block in self.blocks:
            x = self.region(block, x)
        return torch.sin(x)

    def chain(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def region(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.policy is None:
            return function(x)
        if self.policy == "plain":
            return checkpoint(function, x, **self.keywords)
        context = functools.partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(function, x, use_reentrant=False, context_fn=context)


def policy(**by_operator: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """A policy by operator name; `other` is for the rest."""
    table: Mapping[Any, CheckpointPolicy] = {
        getattr(ATEN, name): value for name, value in by_operator.items() if name != "other"
    }
    other = by_operator.get("other", CheckpointPolicy.PREFER_RECOMPUTE)

    def choose(context: Any, operator: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        return table.get(operator.overloadpacket, other)

    return choose


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(256, 16)]


def planned(model: Callable[..., Any], budget: object = "max", **settings: Any) -> Planned:
    (found,) = look(model, inputs(), memory_budget=budget, device="cpu", **settings)
    return found


def named(problem: Any, prefix: str) -> list[Any]:
    """The values that the operator of this name makes in a region."""
    return [v for v in problem.values if re.fullmatch(rf"{prefix}(_\d+)?", v.name) and v.origin.region]


# -- tags are pins ----------------------------------------------------------------------------------------------------


def test_tags_become_pins_with_their_region() -> None:
    tags = policy(mm=CheckpointPolicy.MUST_SAVE, sin=CheckpointPolicy.MUST_RECOMPUTE)
    problem = planned(Blocks(tags, 2)).problem
    products, sines = named(problem, "mm"), named(problem, "sin")
    assert [(v.pin, v.tag, v.origin.region) for v in products] == [(SAVE, MUST_SAVE, k) for k in (1, 1, 2, 2)]
    assert [(v.pin, v.tag, v.origin.region) for v in sines] == [(RECOMPUTE, MUST_RECOMPUTE, k) for k in (1, 1, 2, 2)]
    assert products[0].origin.module_path.endswith("blocks.0.up")


@pytest.mark.parametrize("keywords", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["new", "reentrant"])
def test_a_checkpoint_prefers_recomputing_all_but_what_is_handed_on(keywords: dict[str, Any]) -> None:
    problem = planned(Blocks("plain", 3, **keywords)).problem
    inside = [v for v in problem.values if v.origin.region and v.in_forward]
    free = [v.name for v in inside if v.pin == FREE]
    assert free == [v.name for v in named(problem, "sin")[1:-1:2]]  # a block's result, where the next one reads it
    assert {(v.pin, v.tag) for v in inside if v.name not in free} == {(RECOMPUTE, PREFER_RECOMPUTE)}


@pytest.mark.parametrize("budget", BUDGETS)
def test_must_is_obeyed_under_every_budget(budget: object) -> None:
    tags = policy(mm=CheckpointPolicy.MUST_RECOMPUTE, sin=CheckpointPolicy.MUST_SAVE)
    found = planned(Blocks(tags), budget)
    assert not {v.name for v in named(found.problem, "mm")} & set(found.plan.saved)
    sines = [v.name for v in named(found.problem, "sin")]
    assert not set(sines) & set(found.plan.recomputed)
    assert set(sines[:-1]) <= set(found.plan.saved)  # of the last one, its cosine may be saved instead


def test_a_product_that_must_be_recomputed_is_even_where_that_is_slow() -> None:
    tags = policy(mm=CheckpointPolicy.MUST_RECOMPUTE)
    plan, free = planned(Blocks(tags)).plan, planned(Blocks()).plan
    assert {n for n in plan.recomputed if n.startswith("mm")} and not {n for n in free.recomputed if n.startswith("mm")}


def test_a_checkpoint_at_max_saves_no_more_than_torch_does() -> None:
    for one_region in (False, True):
        plan = planned(Blocks("plain", one_region=one_region)).plan
        free = planned(Blocks(one_region=one_region)).plan
        assert len(plan.saved) <= 4 - 1 and plan.saved_bytes < free.saved_bytes / 2
        assert not any(name.startswith("mm") for name in plan.saved)


def test_a_checkpoint_is_set_aside_where_the_budget_demands_it() -> None:
    model = functools.partial(Blocks, "plain", 8, one_region=True)
    whole, lowest = planned(model(), "1GiB"), planned(model(), "min")
    assert not any(name.startswith("mm") for name in whole.plan.saved) and not whole.report.message
    assert any(name.startswith(("mm", "sin")) for name in lowest.plan.saved)
    assert lowest.plan.peak_bytes < whole.plan.peak_bytes / 2
    assert "PREFER_RECOMPUTE (the tag of torch.utils.checkpoint)" in lowest.report.message
    between = planned(model(), f"{(lowest.plan.peak_bytes + whole.plan.peak_bytes) // 2} B")
    assert between.plan.is_feasible and between.report.message == lowest.report.message
    assert {p.plan.problem_key for p in (whole, lowest, between)} == {whole.problem.key()}


def test_what_must_be_recomputed_is_not_set_aside() -> None:
    tags = policy(other=CheckpointPolicy.MUST_RECOMPUTE)
    lowest = planned(Blocks(tags, 4, one_region=True), "min")
    assert not set(lowest.plan.saved) & {v.name for v in lowest.problem.values if v.tag} and not lowest.report.message


def test_prefer_save_is_obeyed_while_it_fits_and_ignored_at_max_as_torch_does() -> None:
    model = functools.partial(Blocks, policy(other=CheckpointPolicy.PREFER_SAVE), 4)
    fastest, lowest, most = planned(model(), "1GiB"), planned(model(), "min"), planned(model(), "max")
    tagged = {v.name for v in fastest.problem.values if v.tag}
    assert not tagged & set(fastest.plan.recomputed) and not fastest.report.message
    assert tagged & set(lowest.plan.recomputed) and "set aside: PREFER_SAVE;" in lowest.report.message
    assert most.plan.saved == planned(Blocks(None, 4), "max").plan.saved


def test_the_lowest_plan_keeps_tags_that_cost_nothing() -> None:
    found = planned(Blocks("plain", 4), "min", inputs="constant")
    untagged = planned(Blocks(None, 4), "min", inputs="constant")
    assert found.plan.peak_bytes <= untagged.plan.peak_bytes / 0.998
    assert bool(found.report.message) == any(
        v.tag and v.pin == RECOMPUTE and v.name in found.plan.saved for v in found.problem.values
    )


def test_a_stored_plan_that_set_tags_aside_is_replayed(tmp_path: Path) -> None:
    first, second = (planned(Blocks("plain", 4, one_region=True), "min", plan_dir=str(tmp_path)) for _ in range(2))
    assert first.report.message and second.plan.status is Status.REPLAYED
    assert (second.plan.saved, second.plan.peak_bytes) == (first.plan.saved, first.plan.peak_bytes)


# -- a limit of work ------------------------------------------------------------------------------------------------------


def test_a_plan_of_a_search_without_work_left_says_so() -> None:
    with pytest.warns(PlannerWarning, match=r"ended at its limit of work \(time_limit\); a larger one") as seen:
        lowest = planned(Blocks("plain", 4, one_region=True), "min", time_limit=1e-9)
    assert len([w for w in seen if w.category is PlannerWarning]) == 1
    lapsed, ended = lowest.report.message.rsplit("; the search", 1)
    assert "set aside" in lapsed and ended.endswith("may find a lower plan")


@pytest.mark.filterwarnings("error::compile_remat.PlannerWarning")
@pytest.mark.parametrize("budget", ["max", "1GiB"])
def test_without_a_search_nothing_is_said_of_its_limit(budget: object) -> None:
    assert planned(Blocks(None, 4), budget, time_limit=1e-9).report.message == ""


def test_every_planner_of_a_choice_has_the_same_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    init = Planner.__init__

    def seen(self: Planner, problem: Any, work_seconds: float | None = None, *others: Any, **named: Any) -> None:
        limits.append(work_seconds)
        init(self, problem, work_seconds, *others, **named)

    monkeypatch.setattr(Planner, "__init__", seen)
    with pytest.raises(TagConflictError) as caught:
        planned(Blocks(policy(other=CheckpointPolicy.MUST_SAVE), 4), "80KiB", time_limit=0.5)
    assert len(limits) > 2 and set(limits) == {0.5} and not hasattr(caught.value, "__notes__")


# -- conflicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_a_conflict_names_the_region_the_module_and_the_line(tag: CheckpointPolicy) -> None:
    with pytest.raises(TagConflictError) as caught:
        planned(Blocks(policy(other=tag), 4, one_region=True), "80KiB")
    error = caught.value
    assert error.budget_bytes < error.floor_bytes and error.free_floor_bytes < error.floor_bytes
    assert error.tagged and all(f"({tag.name} in checkpointed region 1)" in str(t) for t in error.tagged)
    assert {t.module_path.split("blocks.")[-1] for t in error.tagged if t.module_path} >= {"0.up", "0.down"}
    assert all(re.search(r"test_plan_policy\.py:\d+$", t.source_line) for t in error.tagged)
    text = str(error)
    assert f"{error.free_floor_bytes:,} bytes" in text and error.tagged[0].source_line in text


def test_without_a_tag_in_the_way_it_is_a_plain_budget_error() -> None:
    harmless = policy(sin=CheckpointPolicy.MUST_RECOMPUTE, other=CheckpointPolicy.PREFER_SAVE)
    for model in (Blocks("plain", 2), Blocks(harmless, 2)):
        with pytest.raises(BudgetError) as caught:
            planned(model, "1KiB")
        assert type(caught.value) is BudgetError


def test_a_conflict_reaches_the_caller_of_a_compiled_model() -> None:
    call = torch.compile(
        Blocks(policy(other=CheckpointPolicy.MUST_SAVE), 4),
        backend=remat,
        options={"memory_budget": "80KiB", "compiler": "eager"},
    )
    with pytest.raises(TagConflictError, match="checkpointed region"):
        call(*inputs())


# -- a fraction is a wish ---------------------------------------------------------------------------------------------


def test_a_fraction_below_the_floor_is_the_lowest_plan_and_one_warning() -> None:
    with pytest.warns(PlannerWarning) as seen:
        found = planned(Blocks(None, 4), 0.05)
    (warning,) = [str(w.message) for w in seen if w.category is PlannerWarning]
    lowest = planned(Blocks(None, 4), "min").plan
    assert found.plan.peak_bytes == found.report.floor_bytes <= lowest.peak_bytes / 0.99
    assert "memory_budget = 0.05" in warning and format_bytes(found.plan.peak_bytes) in warning
    assert found.report.budget == "0.05" and found.report.message in warning


def test_a_fraction_and_a_tag_in_its_way_say_so() -> None:
    tags = policy(other=CheckpointPolicy.MUST_SAVE)
    with pytest.warns(PlannerWarning, match="without MUST_SAVE and MUST_RECOMPUTE it would be"):
        assert not planned(Blocks(tags, 4), 0.2).plan.is_feasible


@pytest.mark.parametrize("checkpointed", [pytest.param(None, marks=pytest.mark.proof), "plain"])
def test_a_fraction_is_of_what_plain_torch_compile_takes(checkpointed: str | None) -> None:
    """The user's checkpoints included: its bytes are those of `max`, which takes torch's own saved set here."""
    most, half = (planned(Blocks(checkpointed, 4, one_region=True), budget) for budget in ("max", 0.5))
    assert half.report.plain is not None and half.report.plain.peak_bytes >= most.plan.peak_bytes
    assert half.report.plain.saved == most.plan.saved
    assert half.report.budget_bytes == half.report.plain.peak_bytes // 2
    assert (
        half.plan.saved == planned(Blocks(checkpointed, 4, one_region=True), f"{half.report.budget_bytes} B").plan.saved
    )


def test_one_is_max() -> None:
    assert planned(Blocks(None, 2), 1.0).report.budget == "max"


def test_the_bytes_of_a_fraction_rise_and_never_fall() -> None:
    model = mlp()
    call = torch.compile(model, backend=remat, options={"memory_budget": 0.8, "compiler": "eager"}, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlannerWarning)  # gradients alone are more than 0.8 of the smallest step
        for size in (2, 512, 40):
            call(torch.randn(size, 64)).sum().backward()
    small, large, last = compile_remat.reports()
    plain = [report.plain.peak_bytes for report in (small, large, last) if report.plain is not None]
    assert [report.budget_bytes for report in (small, large, last)] == [int(0.8 * plain[k]) for k in (0, 1, 1)]
    assert plain[0] < plain[2] < plain[1] and last.message == ""


def mlp() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])


@pytest.mark.parametrize("sizes", [(512, 40), (40, 512)])
def test_a_batch_of_another_size_does_not_stop_training(sizes: tuple[int, int]) -> None:
    """For example the last batch of an epoch: its gradients do not shrink with the batch."""
    model = mlp()
    call = torch.compile(model, backend=remat, options={"memory_budget": 0.5, "compiler": "eager"}, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlannerWarning)
        for size in sizes:
            call(torch.randn(size, 64)).sum().backward()
    assert len(compile_remat.reports()) == 2


# -- where a node must run --------------------------------------------------------------------------------------------


class Placed(Traced):
    """A function whose joint graph gets partitioner tags before we see it, as passes of others may set them."""

    def __init__(self, function: Callable[..., Tensor], tag: str, target: Any, **settings: Any) -> None:
        def place(joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
            nodes = [n for n in joint.graph.nodes if n.target is target]
            for node in nodes if tag == "must_be_in_backward" else nodes[:1]:
                node.meta["partitioner_tag"] = tag
            return partition(joint, joint_inputs, **keywords, **settings)

        super().__init__(function)
        from functorch.compile import aot_function

        self.call = aot_function(
            function,
            fw_compiler=functools.partial(self._keep, "forward"),
            bw_compiler=functools.partial(self._keep, "backward"),
            partition_fn=place,
        )


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((16, 64), (64, 16))]


def square(x: Tensor, w: Tensor) -> Tensor:
    return torch.exp((torch.sin(x @ w).t() @ x).cos())


@pytest.mark.filterwarnings("error::compile_remat.PlannerWarning")
@pytest.mark.parametrize("budget", ["max", "1GiB", "min"])
@pytest.mark.parametrize("target", [ATEN.sin.default, ATEN.mm.default, ATEN.t.default])
def test_what_must_be_in_the_forward_is_saved(target: Any, budget: object) -> None:
    traced = Placed(square, "must_be_in_forward", target, memory_budget=budget)
    torch.testing.assert_close(gradients(traced.call, leaves()), gradients(square, leaves()))
    forward, backward = (traced.graphs[name].graph for name in ("forward", "backward"))
    tagged = {n.name for n in forward.nodes if n.meta.get("partitioner_tag") == "must_be_in_forward"}
    assert tagged and not tagged & {n.name for n in backward.nodes if n.op == "call_function"}


@pytest.mark.filterwarnings("error::compile_remat.PlannerWarning")
@pytest.mark.parametrize("budget", ["max", "1GiB", "min"])
def test_what_must_be_in_the_backward_is_not_computed_before(budget: object) -> None:
    def twice(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(torch.sin(x @ w) @ w.t())

    traced = Placed(twice, "must_be_in_backward", ATEN.cos.default, memory_budget=budget)
    torch.testing.assert_close(gradients(traced.call, leaves()), gradients(twice, leaves()))
    assert "aten.cos.default" not in traced.targets("forward")
    assert traced.targets("backward").count("aten.cos.default") == 2


# -- the truth before any tag -----------------------------------------------------------------------------------------


class Stale(nn.Module):
    """A checkpointed region reads a buffer that the forward changes afterwards."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 0.3))
        self.linear, self.is_checkpointed = nn.Linear(16, 16), is_checkpointed

    def region(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x)) * self.scale.exp() * torch.cos(x)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.region, x, use_reentrant=False) if self.is_checkpointed else self.region(x)
        self.scale.mul_(2.0)
        return y * y


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("budget", ["max", "min"])
def test_a_region_that_reads_a_mutated_buffer_gets_the_old_one(budget: str, compiler: str) -> None:
    """Eager mode recomputes from the new buffer, so the reference is the model without its checkpoint."""
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Stale(is_checkpointed)
        options = {"memory_budget": budget, "compiler": compiler}
        call = torch.compile(model, backend=remat, options=options) if is_checkpointed else model
        call(*inputs()).sum().backward()
        results.append([*(p.grad for p in model.parameters()), model.scale])
    torch.testing.assert_close(results[1], results[0])


# -- torch's own ratios -----------------------------------------------------------------------------------------------


def ratio(value: float) -> Any:
    return torch._functorch.config.patch(activation_memory_budget=value)


def unbudgeted(model: Callable[..., Any], **settings: Any) -> Planned:
    (found,) = look(model, inputs(), device="cpu", **settings)
    return found


def test_torchs_ratio_is_a_fraction_of_plains_peak() -> None:
    with ratio(0.6):
        found = unbudgeted(Blocks(None, 4))
    assert found.report.budget == "0.6" and found.plan.is_feasible
    assert found.plan == planned(Blocks(None, 4), 0.6).plan


def test_torchs_ratio_is_of_each_graph_by_itself() -> None:
    plain_peaks.note_plain_bytes("cpu", 1 << 30)
    with ratio(0.6):
        found = unbudgeted(Blocks(None, 4))
    assert found.report.budget_bytes is not None and found.report.budget_bytes < 1 << 20


def test_torchs_ratio_below_the_floor_is_the_lowest_plan_and_a_warning() -> None:
    with ratio(0.05), pytest.warns(PlannerWarning, match=r"activation_memory_budget = 0\.05 allows"):
        found = unbudgeted(Blocks(None, 4))
    lowest = planned(Blocks(None, 4), "min").plan
    assert found.plan.peak_bytes <= lowest.peak_bytes / 0.99
    assert found.report.floor_bytes == found.plan.peak_bytes and "lowest plan" in found.report.message


@pytest.mark.parametrize(("checkpointed", "count"), [("plain", 1), (None, 0)])
def test_a_missed_fraction_names_its_setting_and_the_models_checkpoints(
    checkpointed: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "0.05")
    with pytest.warns(PlannerWarning, match=r"memory_budget = 0\.05 allows"):
        message = unbudgeted(Blocks(checkpointed, 4)).report.message
    assert "set by the environment variable REMAT_MEMORY_BUDGET" in message
    assert message.count("the model's own activation checkpoints make this fraction so low") == count
    assert len(re.findall(r"\(\d+ tensors may not be saved\)", message)) == count
    with pytest.warns(PlannerWarning, match=r"set by the option 'memory_budget'\)"):
        unbudgeted(Blocks(checkpointed, 4), memory_budget=0.05)


def test_torchs_ratio_zero_is_min_and_one_is_no_ratio() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        with ratio(0.0):
            assert unbudgeted(Blocks(None, 4)).report.budget == "min"
        with ratio(1.0):
            assert unbudgeted(Blocks(None, 4)).report.budget == "max"  # `auto` on a device of unknown capacity


def test_a_ratio_and_a_tag_in_its_way_say_so() -> None:
    tags = policy(other=CheckpointPolicy.MUST_SAVE)
    with ratio(0.2), pytest.warns(PlannerWarning, match="without MUST_SAVE and MUST_RECOMPUTE it would be"):
        assert not unbudgeted(Blocks(tags, 4)).plan.is_feasible


@pytest.mark.parametrize("given", ["option", "variable", "auto"])
def test_a_given_budget_beats_torchs_ratio_with_one_warning(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if given == "variable":
        monkeypatch.setenv("REMAT_MEMORY_BUDGET", "max")
    settings = {} if given == "variable" else {"memory_budget": "max" if given == "option" else "auto"}
    with ratio(0.4), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [unbudgeted(Blocks(None, 4), **settings) for _ in range(2)]
    assert [f.report.budget for f in found] == ["max", "max"]
    (warning,) = [w for w in seen if w.category is SettingWarning]
    assert "activation_memory_budget is set, and so is memory_budget = max, which wins" in str(warning.message)


def test_partition_obeys_torchs_ratio_where_no_budget_is_given() -> None:
    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.sin(x @ weight)
        return x

    tensors = [torch.randn(shape, requires_grad=True) for shape in [(256, 16), *[(16, 16)] * 8]]
    budgets = []
    for value, settings in ((0.6, {}), (1.0, {}), (0.6, {"memory_budget": "min"})):
        with ratio(value), warnings.catch_warnings():
            warnings.simplefilter("ignore", SettingWarning)
            gradients(Traced(chain, **settings).call, tensors)
        budgets.append(compile_remat.reports()[-1].budget)
    assert budgets == ["0.6", "max", "min"]


def test_the_ratio_is_part_of_the_cache_key() -> None:
    keys = set()
    for value in (1.0, 0.5):
        for settings in ({}, {"memory_budget": "auto"}):
            with ratio(value):
                keys.add(RematPartitioner(settings_for(RematConfig.resolve(settings, {}), inputs())).uuid())
    assert len(keys) == 4


def test_the_configuration_knows_whether_the_budget_was_given() -> None:
    assert not RematConfig.resolve({}, {}).memory_budget.is_given
    assert not RematConfig().memory_budget.is_given
    for config in (
        RematConfig.resolve({"memory_budget": "auto"}, {}),
        RematConfig.resolve({}, {"REMAT_MEMORY_BUDGET": "auto"}),
        RematConfig(memory_budget="auto"),  # type: ignore[arg-type]
    ):
        assert config.memory_budget.is_given and config == RematConfig()


@pytest.mark.parametrize("is_free", [True, False])
def test_auto_still_holds_beside_a_ratio(is_free: bool) -> None:
    from compile_remat.budget import MemoryBudget
    from compile_remat.passes import Planner
    from compile_remat.planning.budget_source import EffectiveBudget
    from compile_remat.planning.plan_policy import choose

    planner = Planner(planned(Blocks(None, 4)).problem)
    peak = planner.fastest().peak_bytes
    limit = peak if is_free else int(0.5 * peak)
    plan = choose(planner, EffectiveBudget(MemoryBudget("fraction", 0.8), limit, "a test", peak)).plan
    assert plan.budget_bytes == min(limit, int(0.8 * peak)) and plan.is_feasible


# -- regions with a ratio ---------------------------------------------------------------------------------------------


class Regions(nn.Module):
    """Two halves, each under a ratio or none."""

    def __init__(self, first: float | None, second: float | None, is_broken: bool = False) -> None:
        super().__init__()
        self.halves = nn.ModuleList([Blocks(None, 4), Blocks(None, 4)])
        self.ratios, self.is_broken = (first, second), is_broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.half(0, x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.half(1, x)

    def half(self, index: int, x: Tensor) -> Tensor:
        value = self.ratios[index]
        if value is None:
            return self.halves[index](x)
        assert REGION is not None
        with REGION(value):
            return self.halves[index](x)


@needs_regions
def test_a_region_ratio_is_the_graphs_and_beats_torchs_setting() -> None:
    with ratio(0.9):
        found = unbudgeted(Regions(0.6, 0.6))
    assert found.report.budget == "0.6" and found.plan == planned(Regions(None, None), 0.6).plan


@needs_regions
def test_each_graph_has_its_own_ratio() -> None:
    found = look(Regions(0.7, 1.0, is_broken=True), inputs(), device="cpu")
    assert [f.report.budget for f in found] == ["0.7", "max"]


@needs_regions
@pytest.mark.parametrize(
    ("ratios", "message"),
    [((0.5, 0.25), "asks for 0.25, 0.5 in one graph"), ((0.5, None), "must cover the whole forward of a graph, and ")],
)
def test_ratios_that_contradict_each_other_are_an_error_unless_a_budget_is_given(ratios: Any, message: str) -> None:
    call = torch.compile(Regions(*ratios), backend=remat, options={"compiler": "eager"})
    with pytest.raises(ConfigError, match=message):
        call(*inputs())
    with pytest.warns(SettingWarning, match="region_activation_memory_budget is set, and so is memory_budget = min"):
        assert planned(Regions(*ratios), "min").report.budget == "min"


@needs_regions
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_gradients_under_a_region_ratio(compiler: str) -> None:
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = Regions(0.6, 0.6) if is_compiled else Regions(None, None)
        call = torch.compile(model, backend=remat, options={"compiler": compiler}) if is_compiled else model
        call(*inputs()).sum().backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0])
    (report,) = compile_remat.reports()
    assert report.budget == "0.6" and report.num_recomputed


def test_the_old_marker_on_a_node_counts_like_torchs_setting() -> None:
    def mark(joint: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
        next(n for n in joint.graph.nodes if n.op == "call_function").meta["memory_budget"] = 0.6
        return partition(joint, joint_inputs, **keywords)

    from functorch.compile import aot_function, nop

    call = aot_function(lambda x, w: torch.sin(torch.sin(x @ w) @ w.t()), nop, nop, partition_fn=mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlannerWarning)
        call(*leaves())
    assert compile_remat.reports()[-1].budget == "0.6"
