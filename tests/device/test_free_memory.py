"""The bytes that `auto` stands for, on a made-up device and on a real one."""

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import compile_remat
from compile_remat._util.host import host_free_bytes
from compile_remat._util.units import format_bytes
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.config import RematConfig
from compile_remat.cost_models import load_device
from compile_remat.device import free_memory
from compile_remat.device.free_memory import Free, auto_budget_bytes, blas_bytes, trainable_bytes
from compile_remat.planning.settings import settings_for
from compile_remat.runtime.process_state import clear_process_state

GIB = 1 << 30
FREE = Free(free=50 * GIB, reserved=8 * GIB, allocated=6 * GIB, capacity=64 * GIB, process_limit=64 * GIB)
NOTHING = Reserve.parse(0)
NO_STATE = OptimizerState.parse("none")
PARAMETERS = [
    torch.nn.Parameter(torch.empty(GIB // 4, device="meta")),
    torch.nn.Parameter(torch.empty(GIB // 4, device="meta"), requires_grad=False),
    torch.empty(GIB // 4, device="meta", requires_grad=True),
    7,
]
"""One GiB that is trained, two that are not, and a size."""


def auto(memory: Free = FREE, reserve: object = 0, state: object = "none") -> float:
    state_bytes = OptimizerState.parse(state).of(trainable_bytes(PARAMETERS))
    budget = auto_budget_bytes(memory, Reserve.parse(reserve), state_bytes)
    return budget / GIB


GRAIN = FREE.capacity // 64
"""Budgets are rounded down to a 64th of the capacity."""


@pytest.mark.parametrize(
    ("changed", "reserve", "state", "left"),
    [
        pytest.param({}, 0, "none", 50 + 8 - 6, id="free and reserved memory less what is in use"),
        pytest.param({"process_limit": 32 * GIB}, 0, "none", 32 - 6, id="a limit of the process counts before that"),
        pytest.param({"process_limit": 63 * GIB}, 0, "none", 52, id="a higher limit"),
        *(({}, reserve, "none", left) for reserve, left in (("25%", 36), ("4GiB", 48), (4 * GIB, 48), ("5%", 48))),
        *(({}, 0, state, left) for state, left in (("sgd", 51), ("adamw", 50), ("10GiB", 42))),
        *(({"free": 50 * GIB + more}, 0, "none", 52 if more >= 0 else 51) for more in (1, GRAIN - 1, -1)),
    ],
)
def test_what_is_left_for_auto(changed: dict[str, int], reserve: object, state: object, left: int) -> None:
    assert auto(dataclasses.replace(FREE, **changed), reserve, state) == left


def test_only_parameters_that_are_trained_count() -> None:
    assert trainable_bytes(PARAMETERS) == GIB


def test_cublas_takes_a_workspace_in_the_forwards_thread_and_in_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert blas_bytes(load_device("h100-sxm").blas_workspace_bytes) == 2 * (32 << 20)
    assert blas_bytes(load_device("a100-80gb").blas_workspace_bytes) == 2 * 8_519_680  # as memory_snapshot() shows
    assert blas_bytes(load_device("cpu").blas_workspace_bytes) == 0
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8")
    assert blas_bytes(8_519_680) == 2 * (8 * 4096 + 8 * 16) * 1024


def test_auto_leaves_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "read", lambda device, given: FREE)
    config = RematConfig(reserve="0", optimizer_state="none", device="h100-sxm")
    assert settings_for(config, [torch.empty(4)]).budget == MemoryBudget(
        "bytes", 51 * GIB
    )  # 52 less 64 MiB, rounded down


def test_never_zero_or_less() -> None:
    assert auto(dataclasses.replace(FREE, free=0, reserved=6 * GIB)) > 0
    assert auto(reserve="60GiB", state="60GiB") > 0


def test_the_log_line_adds_up() -> None:
    assert free_memory.describe(FREE, 20 * GIB) == "budget 20.0 GiB + 6.0 GiB already allocated = 26.0 GiB of 64.0 GiB"


def test_cpu_has_no_capacity_so_auto_is_max() -> None:
    assert free_memory.read(torch.device("cpu")) is None
    assert free_memory.read(torch.device("meta"), GIB) is None
    settings = settings_for(RematConfig(), [torch.empty(4)])
    assert settings.budget == MemoryBudget("max")
    assert settings.from_auto


def test_auto_becomes_bytes_where_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "read", lambda device, given: FREE)
    settings = settings_for(RematConfig(reserve="0", optimizer_state="none"), [torch.empty(4)])
    assert settings.budget == MemoryBudget("bytes", 52 * GIB)
    explicit = settings_for(RematConfig(memory_budget="3GiB"), [torch.empty(4)])
    assert (explicit.budget, explicit.from_auto) == (MemoryBudget("bytes", 3 * GIB), False)


def test_auto_below_the_floor_warns_and_takes_the_lowest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Free(free=0, reserved=0, allocated=0, capacity=64, process_limit=64)
    monkeypatch.setattr(free_memory, "read", lambda device, given: tiny)
    x = torch.randn(64, 64, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x) @ x)

    with pytest.warns(compile_remat.PlannerWarning, match="the memory that is free"):
        report = compile_remat.explain(twice, x)
    assert report.message and report.floor_bytes == report.predicted_peak_bytes
    assert report.predicted_peak_bytes == compile_remat.explain(twice, x, memory_budget="min").predicted_peak_bytes


def test_a_cpu_with_a_given_capacity_counts_what_is_resident() -> None:
    held = torch.ones(64 << 20, dtype=torch.uint8)
    memory = free_memory.read(torch.device("cpu"), 10 * GIB)
    assert memory is not None
    assert memory.allocated == memory.reserved > held.nbytes
    assert memory.capacity == memory.process_limit == 10 * GIB
    assert memory.available <= 10 * GIB - memory.allocated


def test_no_figures_from_the_system_are_no_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory.resident_bytes(tmp_path / "absent") is None
    assert host_free_bytes(tmp_path / "absent") is None
    monkeypatch.setattr(free_memory, "resident_bytes", lambda: None)
    assert free_memory.read(torch.device("cpu"), GIB) is None


def test_the_setting_makes_auto_a_budget_on_a_cpu() -> None:
    resident = free_memory.resident_bytes()
    assert resident is not None
    given = resident + GIB
    settings = settings_for(RematConfig(capacity=given, reserve="25%", optimizer_state="256MiB"), [torch.empty(4)])
    expected = GIB - given * 0.25 - GIB / 4
    assert settings.from_auto and settings.budget.kind == "bytes"
    assert abs(float(settings.budget.value or 0) - max(1, expected)) <= given / 64 + 0.02 * GIB


class Deep(torch.nn.Module):
    """A model whose default peak is about 5 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(torch.tanh(layer(x)))
        return x.square().mean()


class Level:
    """A device's memory of which the test says how much is allocated; `free_memory.read` reads it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capacity_bytes: int) -> None:
        self.capacity_bytes, self.allocated_bytes = capacity_bytes, 0
        monkeypatch.setattr(free_memory, "read", self.read)
        torch.compiler.reset()
        clear_process_state()

    def read(self, device: torch.device, given: int | None = None) -> Free:
        free_bytes = self.capacity_bytes - self.allocated_bytes
        return Free(free_bytes, self.allocated_bytes, self.allocated_bytes, self.capacity_bytes, self.capacity_bytes)


def under_auto(model: torch.nn.Module, optimizer_state: str) -> Callable[[torch.Tensor], torch.Tensor]:
    options = {"memory_budget": "auto", "reserve": 0, "optimizer_state": optimizer_state, "compiler": "eager"}
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(model, backend=remat, options=options)
    return compiled


@pytest.mark.parametrize("optimizer_state", ["adamw", "none"])
@pytest.mark.parametrize(("then", "plans"), [(63 << 20, 1), (3 << 20, 2)], ids=["enough is left", "too little is left"])
def test_when_the_optimizer_has_its_state_the_level_is_read_once_more(
    monkeypatch: pytest.MonkeyPatch, then: int, plans: int, optimizer_state: str
) -> None:
    level = Level(monkeypatch, 64 << 20)
    model, x = Deep(), torch.randn(1024, 64)
    call = under_auto(model, optimizer_state)
    losses = []
    for free_bytes in (then, 1 << 20, 1 << 20, 1 << 20):  # free bytes after each step
        loss = call(x)
        loss.backward()
        losses.append(loss.item())
        model.zero_grad()
        level.allocated_bytes = (64 << 20) - free_bytes
    assert losses == [losses[0]] * 4
    reports = compile_remat.reports()
    assert len(reports) == plans
    if plans == 2:
        assert reports[0].predicted_peak_bytes > then >= reports[1].predicted_peak_bytes  # type: ignore[operator]
        assert reports[1].budget_bytes == then


@pytest.mark.parametrize(("optimizer_state", "copies"), [("adamw", 2), ("none", 0)])
def test_a_second_micro_batch_has_room_beside_the_gradients_of_the_first(
    monkeypatch: pytest.MonkeyPatch, optimizer_state: str, copies: int
) -> None:
    """The gradients are allocated, and the state of an optimizer that has not stepped yet is still to come."""
    model, x = Deep(), torch.randn(1024, 64)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    fastest = compile_remat.explain(model, x, memory_budget="max", compiler="eager").predicted_peak_bytes
    assert fastest is not None
    capacity_bytes = 64 * math.ceil((fastest + copies * gradient_bytes) / 63)
    level = Level(monkeypatch, capacity_bytes)
    call = under_auto(model, optimizer_state)
    for _ in range(3):
        call(x).backward()
        level.allocated_bytes = gradient_bytes
    first, second = compile_remat.reports()
    left_bytes = capacity_bytes - (1 + copies) * gradient_bytes
    assert first.predicted_peak_bytes > left_bytes >= second.predicted_peak_bytes  # type: ignore[operator]


@pytest.mark.parametrize("setting", ["auto", "64MiB"])
def test_the_first_log_line_says_what_comes_on_top(
    setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Level(monkeypatch, 64 << 20)
    model = Deep()
    gradients = format_bytes(sum(parameter.nbytes for parameter in model.parameters()))
    with caplog.at_level(logging.INFO, "compile_remat"):
        options = {"memory_budget": setting, "reserve": 0, "optimizer_state": "none", "compiler": "eager"}
        torch.compile(model, backend=remat, options=options)(torch.randn(8, 64))
    text = "budget 64.0 MiB + 0 B already allocated = 64.0 MiB of 64.0 MiB"
    assert caplog.messages[0] == f"{text}; gradients that an earlier micro-batch leaves come on top: {gradients}"


@pytest.mark.parametrize("setting", ["0.9", "min", "max"])
def test_so_does_the_line_of_a_budget_whose_bytes_are_not_known_yet(
    setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Deep()
    gradients = format_bytes(sum(parameter.nbytes for parameter in model.parameters()))
    with caplog.at_level(logging.INFO, "compile_remat"):
        torch.compile(model, backend=remat, options={"memory_budget": setting, "compiler": "eager"})(torch.randn(8, 64))
    assert (
        caplog.messages[0] == f"budget {setting}; gradients that an earlier micro-batch leaves come on top: {gradients}"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_read_on_cuda() -> None:
    device = torch.device("cuda")
    before = free_memory.read(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    after = free_memory.read(device)
    assert before is not None and after is not None
    assert after.allocated - before.allocated == held.nbytes
    assert after.capacity == torch.cuda.get_device_properties(device).total_memory
    assert 0 < after.free < after.capacity
    assert after.process_limit <= after.capacity
    assert after.reserved >= after.allocated
