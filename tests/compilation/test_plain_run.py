"""The peak of plain torch.compile: if nobody asks for it, if it cannot be read, and of whole graphs that compute gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import compile_remat
from benchmarks.common.code_only import compile_code, plain_peak_bytes, without_compiler
from compile_remat import PlannerWarning
from compile_remat.compilation import driver, plain_run
from compile_remat.inductor.light_code import reading
from compile_remat.runtime.process_state import clear_process_state

X = torch.randn(512, 64)


def chain() -> nn.Module:
    """Three layers with a tanh each."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])


def compiled(model: Callable[..., Tensor], budget: float | str | None) -> list[compile_remat.Report]:
    """The reports of a graph whose code is emitted in a process that knows nothing."""
    torch.compiler.reset()
    clear_process_state()
    with without_compiler():
        compile_code(model, (X,), budget)
    return compile_remat.reports()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The result of each call of `lowered_plain`, in order."""
    found: list[Any] = []

    def seen(*arguments: Any) -> Any:
        found.append(plain_run.lowered_plain(*arguments))
        return found[-1]

    monkeypatch.setattr(driver, "lowered_plain", seen)
    return found


@pytest.mark.usefixtures("empty_kernels")
def test_sizes_that_vary_leave_no_traceback_in_torchs_log(monkeypatch: pytest.MonkeyPatch, lowered: list[Any]) -> None:
    """Torch compiles such a backward early, and logs the exception by which reading leaves it."""
    logged: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("torch._functorch._aot_autograd.graph_compile"), "handlers", [handler])
    torch.compiler.reset()
    clear_process_state()
    model = chain()
    step = torch.compile(lambda x: model(x) * x.shape[0], backend="remat", dynamic=True, options={"memory_budget": 0.9})
    step(X).sum().backward()
    assert lowered[0] is not None and not [text for text in logged if "eagerly compile backwards" in text]


def test_a_fraction_is_of_the_code_of_plain(lowered: list[Any]) -> None:
    (report,) = compiled(chain(), 0.8)
    torch.compiler.reset()
    with without_compiler():
        emitted_bytes = plain_peak_bytes(chain(), (X,))
    assert report.plain is not None and report.plain.peak_bytes == emitted_bytes == lowered[0].peak_bytes
    assert report.budget_bytes == int(0.8 * report.plain.peak_bytes) and len(lowered) == 1
    assert max(nbytes for _, nbytes in lowered[0].backward) <= emitted_bytes
    assert max(nbytes for _, nbytes in lowered[0].forward) == lowered[0].forward_peak_bytes


@pytest.mark.parametrize("budget", ["max", "min", "1MiB"])
def test_no_other_budget_asks(lowered: list[Any], budget: str) -> None:
    compiled(chain(), budget)
    assert not lowered


def test_a_graph_without_gradients_is_not_lowered(lowered: list[Any]) -> None:
    with torch.no_grad():
        compiled(lambda x: x.sin() @ x.T, 0.5)
    assert not lowered


def test_a_ratio_of_torch_is_of_plain_without_it(lowered: list[Any]) -> None:
    (given,) = compiled(chain(), 0.8)
    with functorch_config.patch(activation_memory_budget=0.8):
        (report,) = compiled(chain(), None)
    assert lowered[0] == lowered[1] and report.budget_bytes == given.budget_bytes


def broken(*_: Any, **__: Any) -> Any:
    """Stands for what fails inside of Inductor."""
    raise RuntimeError("no such operator")


def test_what_cannot_be_read_is_estimated_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_run, "compile_with_partitioner", broken)
    with pytest.warns(PlannerWarning, match="estimated.*no such operator"):
        (report,) = compiled(chain(), 0.8)
    assert report.plain is not None and report.budget_bytes == int(0.8 * report.plain.peak_bytes)


def test_plain_that_is_not_read_is_known_by_its_code(monkeypatch: pytest.MonkeyPatch, lowered: list[Any]) -> None:
    (read,) = compiled(chain(), 0.8)
    monkeypatch.setattr(reading, "read", broken)
    (report,) = compiled(chain(), 0.8)
    assert report.plain is not None and read.plain is not None
    assert report.plain.peak_bytes == read.plain.peak_bytes and not lowered[-1].forward


def test_of_a_graph_with_its_gradients_inside_the_whole_counts(lowered: list[Any]) -> None:
    reports = compiled(torch.func.grad(lambda x: (x.sin() @ x.T).tanh().exp().sum()), 0.9)
    assert len(lowered) == 1 and not lowered[0].forward
    assert [report.budget_bytes for report in reports] == [int(0.9 * lowered[0].peak_bytes)]


@pytest.mark.proof
@pytest.mark.usefixtures("empty_kernels")
def test_dynamo_may_trace_a_graph_anew_while_its_plain_code_is_read(lowered: list[Any]) -> None:
    """A rate of dropout that changes: torch finds only then that the float has to be a constant of the graph."""
    torch.compiler.reset()
    clear_process_state()
    model = chain()
    call = torch.compile(
        lambda x, rate: nn.functional.dropout(model(x), rate).sum(), backend="remat", options={"memory_budget": 0.9}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rate in (0.1, 0.2):
            call(X, rate).backward()
    assert not [str(each.message) for each in caught if "is estimated" in str(each.message)]
    assert lowered and all(facts is not None for facts in lowered)
