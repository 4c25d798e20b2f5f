"""Training while saved tensors wait on the host, by a pinned plan: the plan's own gradients, its peak, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_remat
from compile_remat import PlannerWarning
from compile_remat._torch.offload import offload_ops
from compile_remat._torch.offload.host_memory import MAPPED
from compile_remat._torch.offload.streams import Direction, HostCopyError, ThreadStreams, streams_replaced
from compile_remat.device.measure import peak_bytes
from compile_remat.passes import Plan
from compile_remat.planning.settings import allow_offload
from tests.threads import run_at_once

pytestmark = pytest.mark.usefixtures("own_caches")
CPU = torch.device("cpu")


@pytest.fixture
def delayed() -> Iterator[None]:
    """Each copy starts late, by a random time: a kernel that does not wait for it computes with other numbers."""
    streams, draw = ThreadStreams(), random.Random(0)
    for direction in Direction:
        streams.engine(CPU, direction).before_copy = lambda: time.sleep(draw.random() / 100)
    with streams_replaced("cpu", streams):
        yield
        streams.drain()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return x.mean((2, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(4, 64, 4, 16).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(4, 64, 64))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "blocks": lambda: (nn.Sequential(*[Block(32) for _ in range(3)]), torch.randn(128, 32)),
    "convolutions": lambda: (Convolutions(), torch.randn(4, 8, 16, 16)),
    "attention": lambda: (nn.Sequential(Attention(), Attention()), torch.randn(4, 64, 64)),
}


class Pinned:
    """A model under a pinned plan, of which a test moves saved values to the host."""

    def __init__(
        self, name: str, folder: Path, compiler: str = "inductor", memory_budget: Any = 0.9, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model, self.given = MODELS[name]()
        self.folder, self.options = folder, {"memory_budget": memory_budget, "compiler": compiler, **options}
        compile_remat.explain(self.model, self.given, **self.settings)
        (self.path,) = folder.glob("*.plan.json")
        self.saved = self.plan.saved

    @property
    def settings(self) -> dict[str, Any]:
        return {"plan_dir": str(self.folder), **self.options}

    @property
    def plan(self) -> Plan:
        return Plan.from_json(self.path.read_text())

    def offload(self, *names: str) -> None:
        stored = json.loads(self.path.read_text())
        places = [{"name": name, "release_before": "", "fetch_before": ""} for name in names]
        self.path.write_text(json.dumps({**stored, "offloaded": places}))
        torch.compiler.reset()

    def compiled(self) -> Callable[[Tensor], Tensor]:
        compiled: Any = torch.compile(self.model, backend="remat", options=compile_remat.options(**self.settings))
        return compiled  # type: ignore[no-any-return]

    def gradients(self, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        self.model.zero_grad()
        call(self.given).square().sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def step_bytes(pinned: Pinned, call: Callable[[Tensor], Tensor]) -> int:
    """Measured peak of forward and backward."""
    pinned.gradients(call)
    pinned.model.zero_grad()
    tangent = torch.ones_like(call(pinned.given))
    return peak_bytes(lambda: call(pinned.given).backward(tangent), "cpu").peak_bytes


@pytest.mark.parametrize(
    ("name", "compiler"),
    [
        ("blocks", "eager"),
        ("attention", "eager"),
        pytest.param("attention", "inductor", marks=pytest.mark.proof),
        pytest.param("blocks", "inductor", marks=pytest.mark.full),
        pytest.param("convolutions", "inductor", marks=pytest.mark.full),
    ],
)
def test_gradients_are_those_of_the_same_plan_that_keeps_all(
    name: str, compiler: str, tmp_path: Path, delayed: None
) -> None:
    pinned = Pinned(name, tmp_path, compiler)
    expected = pinned.gradients(pinned.compiled())
    assert not pinned.plan.offloaded
    pinned.offload(*pinned.saved)
    assert len(pinned.plan.offloaded) >= 3
    call = pinned.compiled()
    for _ in range(3):
        assert equal(pinned.gradients(call), expected)


@pytest.mark.proof
def test_the_measured_peak_falls_and_is_the_reported_one(tmp_path: Path) -> None:
    pinned = Pinned("blocks", tmp_path)
    call = pinned.compiled()
    before = step_bytes(pinned, call), compile_remat.reports()[-1].scheduled_peak_bytes
    pinned.offload(*[name for name in pinned.saved if name.startswith("mul")][:1])
    call = pinned.compiled()
    after = step_bytes(pinned, call), compile_remat.reports()[-1].scheduled_peak_bytes
    assert before[1] is not None and after[1] is not None
    assert before[1] - after[1] == before[0] - after[0] > 0


def test_two_forwards_before_two_backwards(tmp_path: Path, delayed: None) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    first, second = call(pinned.given).square().sum(), call(pinned.given).square().sum()
    for loss in (first, second):
        pinned.model.zero_grad()
        loss.backward()
        assert equal([parameter.grad for parameter in pinned.model.parameters()], expected)  # type: ignore[misc]


def test_a_second_backward_of_one_forward(tmp_path: Path, delayed: None) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    loss = call(pinned.given).square().sum()
    parameters = list(pinned.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    torch.compiler.reset()
    assert equal(list(first), list(second)) and equal(list(first), pinned.gradients(pinned.compiled()))


def test_threads_train_at_once(tmp_path: Path, delayed: None) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    parameters = list(pinned.model.parameters())

    def train() -> None:
        for _ in range(5):
            assert equal(list(torch.autograd.grad(call(pinned.given).square().sum(), parameters)), expected)

    run_at_once(train, train, train)


def test_nothing_is_left_of_a_forward_without_a_backward_and_of_one_that_raises(tmp_path: Path) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    gc.collect()
    before = len(offload_ops._transfers), MAPPED.live_bytes
    call(pinned.given)
    hook = pinned.model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pinned.model(call(pinned.given))
    hook.remove()
    gc.collect()
    assert (len(offload_ops._transfers), MAPPED.live_bytes) == before == (0, 0)
    assert equal(pinned.gradients(call), expected)


def test_under_hooks_of_saved_tensors(tmp_path: Path, delayed: None) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        assert equal(pinned.gradients(call), expected)


class Failing(ThreadStreams):
    """Copies of the CPU that fail from a moment on, as does host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Direction | str = ""
        for direction in Direction:
            self.engine(CPU, direction).before_copy = functools.partial(self._fail, direction)

    def empty_host(self, like: Tensor) -> Tensor:
        if self.fails == "memory":
            raise HostCopyError("compile_remat: the host has no memory, said the test")
        return super().empty_host(like)

    def _fail(self, direction: Direction) -> None:
        if self.fails == direction:
            raise OSError("said the test")


@pytest.fixture
def failing() -> Iterator[Failing]:
    streams = Failing()
    with streams_replaced("cpu", streams):
        yield streams
        streams.drain()
    allow_offload()


@pytest.mark.parametrize("fails", ["memory", *Direction])
def test_after_a_copy_that_fails_the_step_is_repeated_without_offload(
    fails: Direction | str, tmp_path: Path, failing: Failing
) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    failing.fails = fails
    with pytest.warns(
        PlannerWarning, match="said the test. The step is repeated under a plan that moves nothing"
    ) as caught:
        assert equal(pinned.gradients(call), expected)
    assert equal(pinned.gradients(call), expected)
    assert len([each for each in caught if each.category is PlannerWarning]) == 1
    report = compile_remat.reports()[-1]
    assert report.plan is not None and not report.plan.offloaded and "without offload" in report.message
    torch.compiler.reset()  # what is compiled later moves nothing either
    assert equal(pinned.gradients(pinned.compiled()), expected)
    gc.collect()
    assert not MAPPED.live_bytes and not offload_ops._transfers


def test_a_copy_that_fails_is_an_error_without_recovery(tmp_path: Path, failing: Failing) -> None:
    pinned = Pinned("blocks", tmp_path, "eager", oom_retry=0)
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    failing.fails = Direction.BACK
    with pytest.raises(HostCopyError, match="a copy between device and host failed: said the test"):
        pinned.gradients(call)
    failing.fails = ""
    assert pinned.gradients(call)


class Wide(nn.Module):
    """Blocks whose saved tensors have MiBs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(128) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x)
        return out


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.proof)])
def test_the_planner_sends_tensors_to_the_host_where_that_is_faster(compiler: str, delayed: None) -> None:
    """On a CPU that is priced as an H100: the budget holds as measured, and gradients stay as they are."""
    torch.manual_seed(0)
    model, given = Wide(), torch.randn(2048, 128)
    settings: dict[str, Any] = {"memory_budget": "24MiB", "device": "h100-sxm", "compiler": compiler}
    found = {}
    for offload in ("off", "auto"):
        torch.compiler.reset()
        options = compile_remat.options(**settings, offload=offload)  # type: ignore[arg-type]
        call: Any = torch.compile(model, backend="remat", options=options)
        model.zero_grad()
        tangent = torch.ones_like(call(given))
        peak = peak_bytes(lambda call=call, tangent=tangent: call(given).backward(tangent), "cpu").peak_bytes
        found[offload] = [parameter.grad for parameter in model.parameters()], compile_remat.reports()[-1], peak
    (kept, before, _), (moved, after, measured) = found["off"], found["auto"]
    assert before.plan is not None and after.plan is not None
    assert after.plan.offloaded and after.plan.extra_time_ns < before.plan.extra_time_ns
    assert equal(kept, moved)  # type: ignore[arg-type]
    if compiler == "inductor":  # without it nothing is fused, and the peak is above the plan's
        assert measured <= 24 * 2**20 and after.predicted_peak_bytes == measured


@pytest.mark.parametrize("inputs", ["as_plain", "constant"])
def test_the_check_of_the_first_step_compares_a_plan_that_offloads(inputs: str, tmp_path: Path, delayed: None) -> None:
    pinned = Pinned("blocks", tmp_path, "eager", inputs=inputs)
    pinned.offload(*pinned.saved)
    expected = pinned.gradients(pinned.compiled())
    torch.compiler.reset()
    pinned.options["check"] = True
    call = pinned.compiled()
    assert equal(pinned.gradients(call), expected) and equal(pinned.gradients(call), expected)
    report = compile_remat.reports()[-1]
    assert report.plan is not None and report.plan.offloaded


def test_out_of_memory_takes_a_lower_plan(tmp_path: Path, delayed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = Pinned("blocks", tmp_path, "eager")
    pinned.offload(*pinned.saved)
    call = pinned.compiled()
    expected = pinned.gradients(call)
    fetch, failures = offload_ops.empty_like_host, [torch.OutOfMemoryError("out of memory, said the test")]

    def empty(*arguments: Any) -> Tensor:
        if failures:
            raise failures.pop()
        return fetch(*arguments)

    monkeypatch.setattr(offload_ops, "empty_like_host", empty)
    with pytest.warns(PlannerWarning, match="out of memory with a predicted peak of"):
        torch.testing.assert_close(pinned.gradients(call), expected)
    assert not failures


def test_graphs_of_several_sizes_move_nothing(delayed: None) -> None:
    """The guide says so: their plans are made for a range of sizes."""
    torch.manual_seed(0)
    model = Wide()
    options = compile_remat.options(memory_budget="24MiB", device="h100-sxm", compiler="eager", offload="auto")
    call: Any = torch.compile(model, backend="remat", options=options, dynamic=True)
    for rows in (2048, 1024):
        call(torch.randn(rows, 128)).sum().backward()
    for report in compile_remat.reports():
        assert report.plan is not None and not report.plan.offloaded
        assert "offload = auto moves nothing: the graph's sizes vary" in report.message


def test_graphs_that_share_a_budget_move_nothing() -> None:
    torch.manual_seed(0)
    model, options = Wide(), compile_remat.options(memory_budget="24MiB", device="h100-sxm", offload="auto")
    for block in model.blocks:
        block.compile(backend="remat", options={**options, "compiler": "eager"})
    for _ in range(2):
        model(torch.randn(2048, 128)).sum().backward()
    running = [report for report in compile_remat.reports() if report.runs_now]
    assert len(running) == 2
    for report in running:
        assert report.plan is not None and not report.plan.offloaded
        assert "offload = auto moves nothing: the graph shares its budget with others" in report.message
