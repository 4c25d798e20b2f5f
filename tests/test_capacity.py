"""What `auto` stands for, on a made-up device and on a real one."""

import dataclasses

import pytest
import torch

import compile_remat
from compile_remat import capacity
from compile_remat.backend import settings_for
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.capacity import Free, auto_budget_bytes, trainable_bytes
from compile_remat.config import RematConfig

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
    budget = auto_budget_bytes(memory, Reserve.parse(reserve), OptimizerState.parse(state), PARAMETERS)
    return budget / GIB


def test_free_and_reserved_memory_less_what_is_in_use() -> None:
    assert auto() == 50 + 8 - 6


def test_a_process_limit_counts_before_what_is_in_use() -> None:
    assert auto(dataclasses.replace(FREE, process_limit=32 * GIB)) == 32 - 6
    assert auto(dataclasses.replace(FREE, process_limit=63 * GIB)) == 52


@pytest.mark.parametrize(("reserve", "left"), [("25%", 36), ("4GiB", 48), (4 * GIB, 48), (0, 52), ("5%", 48)])
def test_the_reserve_is_bytes_or_a_share_of_the_capacity(reserve: object, left: int) -> None:
    assert auto(reserve=reserve) == left


@pytest.mark.parametrize(("state", "left"), [("none", 52), ("sgd", 51), ("adamw", 50), ("10GiB", 42)])
def test_the_optimizers_state_to_come_is_left_free(state: object, left: int) -> None:
    assert auto(state=state) == left


def test_only_parameters_that_are_trained_count() -> None:
    assert trainable_bytes(PARAMETERS) == GIB


def test_rounded_down_to_a_64th_of_the_capacity() -> None:
    grain = FREE.capacity // 64
    for spare in (0, 1, grain - 1):
        assert auto(dataclasses.replace(FREE, free=50 * GIB + spare)) == 52
    assert auto(dataclasses.replace(FREE, free=50 * GIB - 1)) == 51


def test_never_zero_or_less() -> None:
    assert auto(dataclasses.replace(FREE, free=0, reserved=6 * GIB)) > 0
    assert auto(reserve="60GiB", state="60GiB") > 0


def test_the_log_line_adds_up() -> None:
    assert capacity.describe(FREE, 20 * GIB) == "budget 20.0 GiB + 6.0 GiB already allocated = 26.0 GiB of 64.0 GiB"


def test_cpu_has_no_capacity_so_auto_is_max() -> None:
    assert capacity.read(torch.device("cpu")) is None
    settings = settings_for(RematConfig(), [torch.empty(4)])
    assert settings.budget == MemoryBudget("max")
    assert settings.from_auto


def test_auto_becomes_bytes_where_memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "read", lambda device: FREE)
    settings = settings_for(RematConfig(reserve="0", optimizer_state="none"), [torch.empty(4)])
    assert settings.budget == MemoryBudget("bytes", 52 * GIB)
    explicit = settings_for(RematConfig(memory_budget="3GiB"), [torch.empty(4)])
    assert (explicit.budget, explicit.from_auto) == (MemoryBudget("bytes", 3 * GIB), False)


def test_auto_below_the_floor_warns_and_takes_the_lowest_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Free(free=0, reserved=0, allocated=0, capacity=64, process_limit=64)
    monkeypatch.setattr(capacity, "read", lambda device: tiny)
    x = torch.randn(64, 64, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.sin(x) @ x)

    with pytest.warns(compile_remat.PlannerWarning, match="the memory that is free"):
        report = compile_remat.explain(twice, x)
    assert report.message and report.floor_bytes == report.predicted_peak_bytes
    assert report.predicted_peak_bytes == compile_remat.explain(twice, x, memory_budget="min").predicted_peak_bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_read_on_cuda() -> None:
    device = torch.device("cuda")
    before = capacity.read(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    after = capacity.read(device)
    assert before is not None and after is not None
    assert after.allocated - before.allocated == held.nbytes
    assert after.capacity == torch.cuda.get_device_properties(device).total_memory
    assert 0 < after.free < after.capacity
    assert after.process_limit <= after.capacity
    assert after.reserved >= after.allocated
