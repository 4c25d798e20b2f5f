"""The pipeline over the variants of a graph: when rows are in slices, in how many, and the reason if none are."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat import (
    BudgetError,
    Plan,
    PlanMismatchError,
    PlannerWarning,
    explain,
    measured_step,
    reports,
    reset_reports,
)
from compile_remat._util.units import format_bytes
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.budget import MemoryBudget
from compile_remat.cost_models import load_device
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import Status
from compile_remat.planning import pipeline
from compile_remat.planning.settings import Settings
from compile_remat.planning.variants import NUMBERS
from compile_remat.runtime.process_state import clear_process_state

ROWS, WIDTH, WORDS = 256, 16, 1024
LOGITS_BYTES = 4 * ROWS * WORDS  # 1 MiB


class Head(nn.Module):
    """Logits that are larger than all else, and the loss; the logits, too, where they are asked for."""

    def __init__(self, returns_logits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.returns_logits = returns_logits

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.relu(self.layer(x)))
        loss = F.cross_entropy(logits, labels)
        return (loss, logits) if self.returns_logits else loss


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, WORDS, (ROWS,), generator=generator)


def plan_of(memory_budget: Any, slices: Any, **settings: Any) -> Plan:
    """The plan by the planner's rules, with nothing lowered, unless a compiler is given."""
    settings = {"compiler": "eager", **settings}
    plan = explain(Head(), *inputs(), memory_budget=memory_budget, slices=slices, **settings).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("budget", ["max", "64MiB"])
def test_where_the_budget_is_met_without_nothing_changes(budget: str) -> None:
    whole, asked = plan_of(budget, "off"), plan_of(budget, "auto")
    assert asked == whole and not asked.sliced


def test_the_lowest_plan_is_in_as_many_slices_as_lower_it() -> None:
    whole, sliced = (plan_of("min", slices, compiler="inductor") for slices in ("off", "auto"))
    assert whole.peak_bytes > LOGITS_BYTES > 2 * sliced.peak_bytes
    assert [product.name for product in sliced.sliced] == ["mm"]
    told = explain(Head(), *inputs(), memory_budget="min", slices="auto")
    assert f"slices          mm in {sliced.sliced[0].slices}" in str(told) and not told.message


def test_no_more_slices_than_a_budget_needs() -> None:
    """Each number of slices makes the step longer, and the fastest that fits is taken."""
    plain, lowest = plan_of("max", "off").peak_bytes, plan_of("min", "auto").peak_bytes
    found = [plan_of(budget, "auto") for budget in ("2MiB", "1MiB", 1.02 * lowest / plain)]
    numbers = [plan.sliced[0].slices if plan.sliced else 1 for plan in found]
    assert all(plan.is_feasible for plan in found)
    assert numbers == sorted(numbers) and numbers[0] < numbers[1] < numbers[-1]


def test_each_variant_is_prepared_and_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    planned: list[Any] = []

    def preparing(graph: Any, *arguments: Any, prepare: Any = pipeline.prepare, **keywords: Any) -> Any:
        prepared.append(graph.module)
        return prepare(graph, *arguments, **keywords)

    def planning(graph: Any, *arguments: Any, plan_joint: Any = pipeline.plan_joint) -> Any:
        planned.append(graph.joint.module)
        return plan_joint(graph, *arguments)

    monkeypatch.setattr(pipeline, "prepare", preparing)
    monkeypatch.setattr(pipeline, "plan_joint", planning)
    assert plan_of("min", "auto").sliced
    num_variants = 1 + len(NUMBERS) + 1  # the best number of slices again, with gradients in the forward
    assert prepared == planned and len(set(map(id, planned))) == len(planned) == num_variants
    del prepared[:], planned[:]
    assert not plan_of("64MiB", "auto").sliced
    assert prepared == planned and len(planned) == 1


def test_a_fraction_that_no_slices_keep_is_named_with_its_bytes() -> None:
    plain = plan_of("max", "off").peak_bytes
    with pytest.warns(PlannerWarning, match=r"memory_budget = 0\.01 allows") as said:
        found = explain(Head(), *inputs(), memory_budget=0.01, slices="auto", compiler="eager")
    assert found.plan is not None and found.plan.sliced and found.budget_bytes == int(0.01 * plain)
    assert f"memory_budget = 0.01 allows {format_bytes(found.budget_bytes)}" in found.message
    assert len([w for w in said if "allows" in str(w.message)]) == 1  # of the plan that is taken, not of all variants


def test_a_graph_that_computes_its_gradients_stays_whole_and_says_so() -> None:
    head = Head()
    parameters = {name: parameter.detach() for name, parameter in head.named_parameters()}

    def step(parameters: dict[str, Tensor], x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return torch.func.grad(lambda p: torch.func.functional_call(head, p, (x, labels)))(parameters)

    torch.compiler.reset()
    reset_reports()
    compiled = torch.compile(step, backend="remat", options={"memory_budget": "min", "slices": 4})
    with pytest.warns(PlannerWarning, match="not computed in slices: the graph computes its gradients itself"):
        compiled(parameters, *inputs())
    assert "the graph computes its gradients itself" in reports()[0].message


def test_a_fraction_is_of_the_whole_graph() -> None:
    plain = explain(Head(), *inputs(), memory_budget=1.0).plan
    found = explain(Head(), *inputs(), memory_budget=0.5, slices="auto")
    assert plain is not None and found.plan is not None and found.plan.sliced
    assert found.budget == "0.5" and found.plan.peak_bytes <= plain.peak_bytes / 2


def test_nothing_is_said_to_be_deprecated() -> None:
    """Graphs are copied to be planned in slices; torch warns where the tree of a graph's arguments is copied with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert plan_of("min", "auto").sliced


def test_a_number_of_slices_is_taken_as_it_is() -> None:
    assert [p.slices for p in plan_of("min", 4).sliced] == [4]
    assert not plan_of("max", 4).sliced


def test_logits_that_are_returned_are_said_to_be_in_the_way() -> None:
    text = re.escape("logits are an output: 1.0 MiB cannot be sliced; return the loss alone")
    step = torch.compile(
        Head(returns_logits=True), backend="remat", options={"memory_budget": 1 << 20, "slices": "auto"}
    )
    with pytest.raises(BudgetError, match=text):
        step(*inputs())
    forget_warnings()
    with pytest.warns(PlannerWarning, match=text):
        found = explain(Head(True), *inputs(), memory_budget="min", slices="auto", compiler="eager")
    assert re.search(text, found.message)


def test_dynamic_sizes_are_said_to_be_in_the_way() -> None:
    x, labels = inputs()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(labels, 0)
    with pytest.warns(PlannerWarning, match="rows of dynamic sizes are not computed in slices"):
        found = explain(Head(), x, labels, memory_budget="min", slices="auto", compiler="eager")
    assert found.plan is not None and not found.plan.sliced
    assert "rows of dynamic sizes" in found.message


def test_graphs_that_share_a_budget_stay_whole_and_say_so() -> None:
    class Broken(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            x = torch.relu(self.layer(x))
            torch._dynamo.graph_break()
            return F.cross_entropy(self.head(x), labels)

    torch.compiler.reset()
    clear_process_state()
    options = {"memory_budget": "16MiB", "slices": 4, "compiler": "eager"}
    step = torch.compile(Broken(), backend="remat", options=options)
    with pytest.warns(PlannerWarning, match="rows are not computed in slices: the graph shares its budget"):
        step(*inputs()).backward()
    found = reports()
    assert len(found) == 2 and not any(report.plan and report.plan.sliced for report in found)
    assert "rows are not computed in slices" in found[0].message


def test_a_pinned_plan_is_replayed(tmp_path: Path) -> None:
    plan = plan_of("min", "auto", plan_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.plan.json")
    assert Plan.from_json(file.read_text()).sliced == plan.sliced
    again = plan_of("min", "auto", plan_dir=str(tmp_path))
    assert (again.sliced, again.saved, again.peak_bytes) == (plan.sliced, plan.saved, plan.peak_bytes)
    assert again.status.name == "REPLAYED"


def test_a_pinned_plan_holds_whatever_a_search_would_find(tmp_path: Path) -> None:
    """Under the key of the whole graph, by which it is looked for: `auto` would take more slices, or none."""
    pinned = plan_of("min", 4, plan_dir=str(tmp_path))
    for budget in ("min", "64MiB", 0.9):
        again = plan_of(budget, "auto", plan_dir=str(tmp_path))
        assert (again.status, again.sliced, again.saved) == (Status.REPLAYED, pinned.sliced, pinned.saved)
    assert len(list(tmp_path.glob("*.plan.json"))) == 1


def test_a_pinned_plan_without_slices_is_obeyed_too(tmp_path: Path) -> None:
    plan_of("min", "off", plan_dir=str(tmp_path))
    found = plan_of("min", "auto", plan_dir=str(tmp_path))
    assert found.status is Status.REPLAYED and not found.sliced


def test_pinned_slices_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    plan_of("min", 4, plan_dir=str(tmp_path))
    with pytest.raises(PlanMismatchError, match=r"rows in slices \(mm in 4\), but slices = off"):
        plan_of("min", "off", plan_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.plan.json")
    text = file.read_text()
    file.write_text(text.replace('"name": "mm"', '"name": "mm_99"'))
    with pytest.raises(PlanMismatchError, match=r"\(mm_99 in 4\) that this graph cannot have"):
        plan_of("min", 4, plan_dir=str(tmp_path))
    file.write_text(text.replace('"slices": 4', '"slices": 8'))
    with pytest.raises(PlanMismatchError, match="holds the plan of graph"):
        plan_of("min", 4, plan_dir=str(tmp_path))


def test_gradients_that_leave_early_are_another_graph_to_plan_for(tmp_path: Path) -> None:
    """The plan of that graph has a file of its own, and is not taken for the other graph's plan."""
    found = {}
    for gradients in ("end", "early", "early"):
        found[gradients] = plan_of("min", 4, plan_dir=str(tmp_path), gradients=gradients)
    files = sorted(tmp_path.glob("*.plan.json"))
    assert len(files) == 2 and found["early"].status is Status.REPLAYED
    first, second = (file.read_text() for file in files)
    files[0].write_text(second)
    files[1].write_text(first)
    with pytest.raises(PlanMismatchError, match="holds the plan of graph"):
        plan_of("min", 4, plan_dir=str(tmp_path), gradients="early")


@pytest.mark.parametrize("returns_logits", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_second_process_says_the_same(returns_logits: bool, own_caches: Path) -> None:
    """Slices raise no warning; a plan without slices raises one, also if the code comes from the cache."""
    for _ in range(2):
        torch.compiler.reset()
        clear_process_state()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", PlannerWarning)
            options = {"memory_budget": "min", "slices": "4"}
            step = torch.compile(Head(returns_logits), backend="remat", options=options)
            made = step(*inputs())
            (made[0] if returns_logits else made).backward()
        texts = [str(w.message) for w in said if w.category is PlannerWarning]
        assert len(texts) == returns_logits and all("logits are an output" in text for text in texts)
        (report,) = reports()
    assert report.from_cache


def test_slices_are_in_the_key_of_what_is_compiled() -> None:
    keys = {
        RematPartitioner(Settings(MemoryBudget("min"), load_device("cpu"), slices=slices)).uuid()
        for slices in (0, 1, 8)
    }
    assert len(keys) == 3


def gradients(step: Any, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    step(*inputs()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.proof)])
def test_a_step_in_slices_has_the_same_gradients_and_keeps_its_budget(compiler: str) -> None:
    model = Head()
    expected = gradients(model, model)
    reset_reports()
    options = {"memory_budget": "min", "slices": "8", "compiler": compiler}
    step = torch.compile(model, backend="remat", options=options)
    for actual, wanted in zip(gradients(step, model), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    if compiler == "inductor":
        model.zero_grad()
        given = inputs()
        with measured_step():
            step(*given).backward()
        (report,) = reports()
        assert report.plan is not None and report.plan.sliced and report.measured_peak_bytes is not None
        assert report.measured_peak_bytes <= 1.03 * report.plan.peak_bytes < LOGITS_BYTES / 2
        assert report.scheduled_peak_bytes is not None, "the dry run follows the calls"


def test_check_compares_slices_with_the_whole_graph() -> None:
    model = Head()
    reset_reports()
    options = {"memory_budget": "min", "slices": "auto", "compiler": "eager", "check": "1"}
    step = torch.compile(model, backend="remat", options=options)
    step(*inputs()).backward()
    (report,) = reports()
    assert report.check == "passed" and report.plan is not None and report.plan.sliced
