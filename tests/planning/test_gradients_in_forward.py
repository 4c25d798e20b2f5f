"""Slices that compute gradients in the forward: when the pipeline takes them, and steps with all kinds of incoming gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_remat import Plan, PlanMismatchError, SlicedProduct, explain, measured_step, reports, reset_reports
from compile_remat.passes import Status
from compile_remat.planning.variants import Candidate, Variant, Variants, best_of
from compile_remat.runtime.process_state import clear_process_state
from tests.planning.test_pipeline import LOGITS_BYTES, ROWS, WIDTH, WORDS, Head, inputs, plan_of

IN_FORWARD = (SlicedProduct("mm", 4, at_once=True),)


def without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pipeline know only slices whose gradients are in the backward."""
    monkeypatch.setattr(Variants, "at_once", lambda self, numbers=(): iter(()))


@pytest.mark.parametrize(("budget", "slices"), [(0.6, "auto"), ("min", 4)])
def test_they_are_taken_where_they_are_faster(budget: Any, slices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is computed twice; what is saved instead is at a peak anyway."""
    found = plan_of(budget, slices)
    without_them(monkeypatch)
    other = plan_of(budget, slices)
    assert found.sliced == IN_FORWARD and other.sliced == (SlicedProduct("mm", 4),)
    assert found.time_ns < 0.95 * other.time_ns and found.peak_bytes <= 1.01 * other.peak_bytes
    assert found.slices_text == "mm in 4, gradients in the forward"


class Deep(Head):
    """Layers before the head, whose activations a budget makes the backward compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU())))  # type: ignore[assignment]
        self.head = nn.Linear(64, WORDS, bias=False)


def test_they_are_tried_where_the_budget_is_met_by_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits' bytes are free for activations then; where nothing is recomputed, the graph stays whole."""
    given = torch.randn(ROWS, 64), inputs()[1]

    def planned(budget: Any, slices: str = "auto") -> Plan:
        plan = explain(Deep(), *given, memory_budget=budget, slices=slices, compiler="eager").plan
        assert plan is not None
        return plan

    whole = planned(0.6, "off")
    assert whole.is_feasible and whole.extra_share > 0.01
    found = planned(0.6)
    assert [product.at_once for product in found.sliced] == [True] and found.time_ns < whole.time_ns
    assert not planned("max").sliced and not planned("64MiB").sliced
    at_once = Variants.at_once

    def with_another(self: Variants, *numbers: Any) -> Iterator[Variant]:
        for variant in at_once(self, *numbers):
            yield replace(variant, products=(*variant.products, SlicedProduct("addmm", 2)))

    monkeypatch.setattr(Variants, "at_once", with_another)
    assert not planned(0.6).sliced, "a product that runs again is sliced only to meet the budget"
    without_them(monkeypatch)
    assert not planned(0.6).sliced


def test_a_plan_that_is_faster_counts_as_lower_if_it_is_about_as_low() -> None:
    low, faster, too_high = (Candidate(*figures, False) for figures in ((1000, 50), (1009, 40), (1011, 40)))
    assert best_of([low, faster]) == 1 and best_of([low, too_high]) == 0
    assert best_of([low, Candidate(1000, 0, False)]) == 0, "a BudgetError has no time"


def test_a_pinned_plan_says_where_the_gradients_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of before, which says nothing, has them in the backward."""
    plan = plan_of("min", 4, plan_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.plan.json")
    assert plan.sliced == IN_FORWARD == Plan.from_json(file.read_text()).sliced
    again = plan_of("64MiB", "auto", plan_dir=str(tmp_path))
    assert (again.status, again.sliced, again.saved) == (Status.REPLAYED, plan.sliced, plan.saved)
    with pytest.raises(
        PlanMismatchError, match=r"rows in slices \(mm in 4, gradients in the forward\), but slices = off"
    ):
        plan_of("min", "off", plan_dir=str(tmp_path))
    file.unlink()
    without_them(monkeypatch)
    plan = plan_of("min", 4, plan_dir=str(tmp_path))
    text = file.read_text()
    assert '"at_once": false' in text
    file.write_text(text.replace('"slices": 4,', '"slices": 4').replace('"at_once": false', ""))
    assert plan_of("min", 4, plan_dir=str(tmp_path)).sliced == plan.sliced == (SlicedProduct("mm", 4),)


# -- steps --------------------------------------------------------------------------------------------------------------


class Tied(Head):
    """The head is the embedding of the labels, too."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        x = torch.relu(self.layer(x)) + F.embedding(labels, self.head.weight)
        return F.cross_entropy(self.head(x), labels)


class WithAuxiliary(Head):
    """A z-loss on the logits and a loss on the hidden states beside the main one."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = torch.relu(self.layer(x))
        logits = self.head(hidden)
        z_loss = torch.logsumexp(logits, -1).square().mean()
        return F.cross_entropy(logits, labels, ignore_index=3) + 1e-2 * z_loss + 0.1 * hidden.square().mean()


def compiled(model: nn.Module, compiler: str = "eager", **settings: Any) -> Callable[..., Tensor]:
    torch.compiler.reset()
    clear_process_state()
    reset_reports()
    options = {"memory_budget": "min", "slices": 4, "compiler": compiler, **settings}
    return torch.compile(model, backend="remat", options=options)  # type: ignore[return-value]


def gradients(step: Callable[..., Tensor], model: nn.Module, use: Callable[[Tensor], None]) -> list[Tensor]:
    model.zero_grad()
    use(step(*inputs()))
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def is_in_forward() -> bool:
    (report,) = reports()
    return report.plan is not None and report.plan.sliced[0].at_once


def accumulated(loss: Tensor) -> None:
    (loss / 8).backward()  # type: ignore[no-untyped-call]


def scaled(loss: Tensor) -> None:
    (65536.0 * loss).backward()  # type: ignore[no-untyped-call]


def erased(loss: Tensor) -> None:
    (0.0 * loss).backward()  # type: ignore[no-untyped-call]


def repeated(loss: Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    (2 * loss).backward()  # type: ignore[no-untyped-call]


def used_twice(loss: Tensor) -> None:
    (loss + loss.square()).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [Head, Tied, WithAuxiliary])
@pytest.mark.parametrize("use", [accumulated, scaled, erased, used_twice], ids=lambda f: f.__name__)
def test_a_loss_may_be_used_in_any_way(kind: Callable[[], nn.Module], use: Callable[[Tensor], None]) -> None:
    model = kind()
    expected = gradients(model, model, use)
    step = compiled(model)
    for actual, wanted in zip(gradients(step, model, use), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5 * max(1.0, float(wanted.abs().max())))
    assert is_in_forward()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_scaler_finds_what_is_not_finite(value: float) -> None:
    model = Head()

    def use(loss: Tensor) -> None:
        (value * loss).backward()  # type: ignore[no-untyped-call]

    found = gradients(compiled(model), model, use)
    assert len(found) == 3 and not any(gradient.isfinite().all() for gradient in found) and is_in_forward()


def test_a_forward_without_a_backward_has_the_same_loss_and_leaves_nothing() -> None:
    """Under `no_grad` there is no graph with gradients at all."""
    model = Head()
    expected, step = model(*inputs()), compiled(model)
    first = step(*inputs())
    torch.testing.assert_close(first, expected)
    assert is_in_forward() and all(parameter.grad is None for parameter in model.parameters())
    del first
    with torch.no_grad():
        torch.testing.assert_close(step(*inputs()), expected)
    gradients(step, model, accumulated)


def test_float16_has_its_gradients_in_the_backward() -> None:
    """A scaled loss brings gradients of 65536, for which the backward computes; the gradients for 1 would underflow."""
    model = Head().half()
    given = inputs()[0].half(), inputs()[1]
    model(*given).float().mul(64.0).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    compiled(model)(*given).float().mul(64.0).backward()
    (report,) = reports()
    assert report.plan is not None and report.plan.sliced == (SlicedProduct("mm", 4),)
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad - wanted).abs().max() / wanted.abs().max()
        assert error < 0.01


def test_check_compares_them_with_the_whole_graph() -> None:
    model = Head()
    step = compiled(model, check="1")
    step(*inputs()).backward()  # type: ignore[no-untyped-call]
    assert is_in_forward() and reports()[0].check == "passed"


@pytest.mark.parametrize("leave", ["end", pytest.param("early", marks=pytest.mark.full)])
@pytest.mark.proof
def test_a_compiled_step_has_the_same_gradients_and_keeps_its_budget(leave: str) -> None:
    model = Head()
    expected = gradients(model, model, accumulated)
    step = compiled(model, "inductor", gradients=leave)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = gradients(step, model, accumulated)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    model.zero_grad()
    given = inputs()
    with measured_step():
        accumulated(step(*given))
    (report,) = reports()
    assert report.plan is not None and report.plan.sliced == IN_FORWARD and report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= 1.03 * report.plan.peak_bytes < LOGITS_BYTES / 2 and WIDTH
