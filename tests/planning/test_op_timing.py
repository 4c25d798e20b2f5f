"""`cost_model="profile"` from the setting to the plan: what is timed and when, going on, cache keys, and other ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.config import RematConfig
from compile_remat.cost_models import Times, load_device
from compile_remat.cost_models.timing import replay
from compile_remat.errors import ConfigError, PlannerWarning
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.planning import op_timing
from compile_remat.planning.settings import Settings

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two sizes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(torch.sin(layer(x)))
        return x


class Clock:
    """Says how often it was asked, and 1000 for the first operator, 2000 for the second...; may break in between."""

    def __init__(self, breaks_at: int = 0) -> None:
        self.count, self.breaks_at = 0, breaks_at

    def __call__(self, run: Callable[[], object], device: torch.device) -> int:
        self.count += 1
        if self.count == self.breaks_at:
            raise KeyboardInterrupt
        run()
        return 1000 * self.count


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, own_caches: None) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(replay, "median_ns", lambda run, device: made(run, device))
    yield made


def train(**options: Any) -> Any:
    """One step of a new model; the report of its graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, 8)
    given = {"memory_budget": "max", "cost_model": "profile", "compiler": "eager", **options}
    torch.compile(model, backend=remat, options=given)(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return compile_remat.reports()[-1]


def test_operators_are_timed_once_and_price_the_plan(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    first = train()
    timed, times = clock.count, op_timing._file(CPU).times_ns()
    assert timed == len(times) > 3 and all("mm" in signature for signature in times)
    assert f"{timed} of {timed}" in capsys.readouterr().err
    assert first.step_time_ns >= sum(times.values()) >= 1000 * timed
    second = train()
    assert clock.count == timed and second.step_time_ns == first.step_time_ns
    assert capsys.readouterr().err == ""
    assert train(cost_model="roofline").step_time_ns != first.step_time_ns
    assert clock.count == timed


def test_a_graph_whose_operators_are_known_is_not_traced_for_them(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    monkeypatch.setattr(op_timing, "_joint_nodes", lambda *args: pytest.fail("traced"))
    train()


def test_it_goes_on_after_an_interruption(clock: Clock) -> None:
    clock.breaks_at = 3
    with pytest.raises(KeyboardInterrupt):
        train()
    kept = op_timing._file(CPU).times_ns()
    assert len(kept) == 2
    train()
    times = op_timing._file(CPU).times_ns()
    assert {s: times[s] for s in kept} == kept and len(times) == clock.count - 1


def test_what_cannot_be_timed_is_priced_by_the_roofline(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_timing, "_free_bytes", lambda place: 0)
    assert train().step_time_ns == train(cost_model="roofline").step_time_ns
    assert clock.count == 0 and op_timing._file(CPU).times_ns() == {}


def test_a_graph_that_cannot_be_traced_is_planned_all_the_same(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(op_timing, "_joint_nodes", fail)
    with pytest.warns(PlannerWarning, match="cannot be timed .RuntimeError: boom."):
        report = train()
    assert report.plan is not None and clock.count == 0


def test_without_a_backward_nothing_is_timed(clock: Clock) -> None:
    with torch.no_grad():
        torch.compile(Net(), backend=remat, options={"cost_model": "profile", "compiler": "eager"})(torch.randn(16, 8))
    assert clock.count == 0


def test_the_times_are_part_of_the_cache_key() -> None:
    def uuid(times: Times) -> object:
        settings = Settings(MemoryBudget("max"), load_device("cpu"), "profile", times=times)
        return RematPartitioner(settings).uuid()

    assert uuid(Times.of({"mm": 1})) == uuid(Times.of({"mm": 1}))
    assert len({uuid(times) for times in (Times(), Times.of({"mm": 1}), Times.of({"mm": 2}))}) == 3


def test_looking_at_a_plan_times_too(clock: Clock) -> None:
    report = compile_remat.explain(Net(), torch.randn(16, 8), cost_model="profile", memory_budget="max")
    assert clock.count > 3 and report.step_time_ns >= 1000 * clock.count
    assert op_timing.known_times(CPU) == Times.of(op_timing._file(CPU).times_ns())


def test_a_device_that_is_not_here_cannot_be_profiled(clock: Clock) -> None:
    with pytest.raises(ConfigError, match="is another one"):
        train(device="h200")
    assert train(device="cpu").plan is not None
    assert RematConfig(cost_model="Profile").cost_model == "profile"
