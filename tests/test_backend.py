"""`torch.compile(backend=remat)` end to end: gradients, settings, bad input, fallbacks, plans on disk, cache keys."""

import copy
import gc
import json
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compile_remat
from compile_remat._torch import joint_graph
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.compilation import driver
from compile_remat.cost_models import load_device
from compile_remat.device.measure import peak_bytes
from compile_remat.errors import BudgetError, ConfigError, DeviceError, PlanMismatchError, PlannerWarning
from compile_remat.partitioning import partitioner
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.planning import searches
from compile_remat.planning.settings import Settings
from tests.correctness.harness import attention_dtype

MIB = 1 << 20


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Dropped(nn.Module):
    """Layers with dropout; the derivative of each depends on its mask and on what came before."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.dropout(torch.sin(layer(x)), 0.3)
        return x


def mlp(layers: int, width: int = 8) -> nn.Module:
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


def attention(layers: int) -> nn.Module:
    return nn.Sequential(*[Block(8) for _ in range(layers)])


def convolutions(layers: int) -> nn.Module:
    parts = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*[part for layer in parts for part in layer], nn.AdaptiveAvgPool2d(1), nn.Flatten())


# name: the model by its number of layers; many of them, and a fraction that they can reach; few of them; the input
MODELS: dict[str, tuple[Callable[[int], nn.Module], int, float, int, tuple[int, ...]]] = {
    "mlp": (mlp, 32, 0.3, 3, (512, 8)),
    "attention": (attention, 4, 0.4, 1, (4, 32, 8)),
    "convolutions": (convolutions, 24, 0.4, 2, (8, 4, 8, 8)),
}


pytestmark = pytest.mark.usefixtures("uncached")


def train(call: Callable[..., Any], model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    """Output, gradients and buffers of one step on copies; `call` gets the model and returns what to call instead."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(seed)
    output = call(model)(x)
    (output * torch.linspace(0.5, 1.5, output.numel()).view_as(output)).sum().backward()
    gradients = [p.grad for p in (x, *model.parameters())]
    assert all(g is not None for g in gradients)
    return [output.detach(), *(g for g in gradients if g is not None), *model.buffers()]


def compiled(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=remat, options=options)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def small(layers: int = 2) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return mlp(layers), torch.randn(64, 8)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param("mlp", marks=pytest.mark.proof), "attention", pytest.param("convolutions", marks=pytest.mark.full)],
)
def test_gradients_equal_eager_at_every_budget(name: str) -> None:
    make, layers, tight, _, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(layers).double(), torch.randn(shape, dtype=torch.float64)  # deep: float32 would differ by rounding
    expected = train(lambda m: m, model, x)
    for budget in ("max", 0.5, tight, "min"):
        torch.compiler.reset()
        assert_same(train(compiled(memory_budget=budget, compiler="eager"), model, x), expected)
        report = compile_remat.reports()[-1]
        assert report.predicted_peak_bytes <= (report.budget_bytes or report.predicted_peak_bytes)
    highest, half, tighter, lowest = (r.predicted_peak_bytes for r in compile_remat.reports())
    assert tighter < half < highest and lowest < half


@pytest.mark.parametrize(
    "name",
    [pytest.param("mlp", marks=pytest.mark.full), "attention", pytest.param("convolutions", marks=pytest.mark.proof)],
)
@pytest.mark.parametrize("budget", [pytest.param("max", marks=pytest.mark.full), "min"])
def test_gradients_equal_eager_under_inductor(name: str, budget: str) -> None:
    make, _, _, layers, shape = MODELS[name]
    torch.manual_seed(0)
    dtype = attention_dtype() if name == "attention" else torch.float64
    model, x = make(layers).to(dtype), torch.randn(shape, dtype=dtype)
    actual = train(compiled(memory_budget=budget), model, x)
    assert_same(actual, train(lambda m: m, model, x))
    (report,) = compile_remat.reports()
    assert report.num_recomputed > 0 or budget == "max"


@pytest.mark.proof
@pytest.mark.usefixtures("empty_kernels")
def test_measured_peak_stays_within_the_budget() -> None:
    torch.manual_seed(0)
    model, x = mlp(12, 128), torch.randn(1024, 128)

    def measured(memory_budget: object) -> int:
        torch.compiler.reset()
        call = torch.compile(model, backend=remat, options={"memory_budget": memory_budget})

        def step() -> None:
            call(x).sum().backward()

        step()
        model.zero_grad(set_to_none=True)
        return peak_bytes(step, "cpu").peak_bytes

    highest = measured("max")
    model.zero_grad(set_to_none=True)
    budget = int(0.6 * highest)
    assert 0.85 * budget <= measured(budget) <= budget


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_bugdet": "max"}, ConfigError, '"memory_budget"'),
        ({"max_fusion_sise": 3}, ConfigError, '"max_fusion_size" \\(Inductor\\)'),
        ({"memory_budget": "8 gigs"}, ConfigError, "8 gigs.*Allowed"),
        ({"memory_budget": 8}, ConfigError, '"8MiB" or "8GiB"'),
        ({"memory_budget": -1}, ConfigError, "negative"),
        ({"memory_budget": 0}, ConfigError, "zero"),
        ({"compiler": "indctor"}, ConfigError, "inductor"),
        ({"mode": "reduce-overhed"}, ConfigError, "reduce-overhead"),
        ({"device": "h1000"}, DeviceError, "h1000"),
        ({"device": "no/such/file.json"}, DeviceError, "file.json"),
    ],
)
def test_a_bad_setting_is_one_clear_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model, x = small()
    with pytest.raises(error, match=message) as caught:
        compiled(**{"compiler": "eager", **options})(model)(x)
    assert type(caught.value) is error


def budget_error(**options: Any) -> BudgetError:
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32))
    call = compiled(memory_budget="1MiB", **options)(model)
    try:
        call(torch.randn(16, 128, 32))
    except BudgetError as error:
        return error
    raise AssertionError("a budget below the floor was accepted")


def test_a_budget_below_the_floor_names_the_floor_and_the_tensors() -> None:
    error = budget_error(compiler="eager")
    assert error.budget_bytes == MIB < error.floor_bytes
    assert len(error.largest) == 5
    assert [t.nbytes for t in error.largest] == sorted((t.nbytes for t in error.largest), reverse=True)
    assert all(t.shape and t.dtype == "float32" for t in error.largest)
    assert any(t.module_path.startswith(("0.", "1.")) for t in error.largest)
    assert all(Path(t.source_line.rpartition(":")[0]).name == Path(__file__).name for t in error.largest)
    assert all(t.source_line.rpartition(":")[2].isdigit() for t in error.largest)


@pytest.mark.proof
def test_the_floor_that_an_error_names_can_be_reached() -> None:
    floor = budget_error(compiler="eager").floor_bytes
    torch.compiler.reset()
    model = nn.Sequential(Block(32), Block(32))
    compiled(memory_budget=floor, compiler="eager")(model)(torch.randn(16, 128, 32)).sum().backward()
    assert compile_remat.reports()[-1].predicted_peak_bytes <= floor


def test_a_budget_error_comes_out_of_inductor_and_past_suppress_errors() -> None:
    with torch._dynamo.config.patch(suppress_errors=True):
        assert budget_error().budget_bytes == MIB


def test_a_bad_setting_is_not_suppressed_either() -> None:
    model, x = small()
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(ConfigError, match="8 gigs"):
        compiled(memory_budget="8 gigs")(model)(x)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_graphs_without_a_backward_work(compiler: str) -> None:
    call = torch.compile(lambda x: torch.sin(x) + 1, backend=remat, options={"compiler": compiler})
    x = torch.randn(8)
    torch.testing.assert_close(call(x), torch.sin(x) + 1)
    assert compile_remat.reports() == []


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_backward_that_reads_nothing_works(compiler: str) -> None:
    x = torch.randn(8, requires_grad=True)
    call = torch.compile(torch.sign, backend=remat, options={"compiler": compiler, "memory_budget": "min"})
    (gradient,) = torch.autograd.grad(call(x).sum(), x)
    torch.testing.assert_close(gradient, torch.zeros(8))


# -- where settings come from -----------------------------------------------------------------------------------------


class _Entered(Exception):
    pass


def entered(monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> tuple[RematPartitioner, dict[str, Any]]:
    """The partitioner and the Inductor options with which Inductor would be entered."""
    seen: list[tuple[RematPartitioner, dict[str, Any]]] = []

    def record(gm: Any, inputs: Any, partitioner: Any, options: Any, **keywords: Any) -> Any:
        seen.append((partitioner, dict(options)))
        return gm.forward

    with monkeypatch.context() as patch:
        patch.setattr(driver, "compile_with_partitioner", record)
        model, x = small()
        torch.compiler.reset()
        torch.compile(model, backend=remat, **keywords)(x)
    (entry,) = seen
    return entry


def test_options_beat_environment_beats_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert entered(monkeypatch)[0].settings.budget == MemoryBudget("max")  # `auto` on CPU
    monkeypatch.setenv("REMAT_MEMORY_BUDGET", "3MiB")
    monkeypatch.setenv("REMAT_DEVICE", "h200")
    settings = entered(monkeypatch)[0].settings
    assert settings.budget == MemoryBudget("bytes", 3 * MIB)
    assert settings.device == load_device("h200")
    settings = entered(monkeypatch, options={"memory_budget": "min", "device": None})[0].settings
    assert settings.budget == MemoryBudget("min")
    assert settings.device == load_device("h200")


def test_both_spellings_of_a_mode_become_inductor_options(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch._inductor.list_mode_options("reduce-overhead")
    as_argument = entered(monkeypatch, mode="reduce-overhead")[1]
    as_option = entered(monkeypatch, options={"mode": "reduce-overhead"})[1]
    assert as_argument == as_option
    assert expected.items() <= as_argument.items()
    assert not expected.items() <= entered(monkeypatch, mode="default")[1].items()


def test_inductor_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    options = entered(monkeypatch, options={"memory_budget": "min", "max-fusion-size": 32})[1]
    assert options["max_fusion_size"] == 32


def test_a_mode_and_inductor_options_train() -> None:
    model, x = small()
    options = {"memory_budget": "min", "mode": "reduce-overhead", "max_fusion_size": 32}
    assert_same(train(compiled(**options), model, x), train(lambda m: m, model, x))


# -- failures that must not stop training -----------------------------------------------------------------------------


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("the planner broke")


def test_a_broken_planner_keeps_the_dropout_masks_under_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Dropped(2, 8), torch.randn(256, 8)
    expected = train(lambda m: torch.compile(m), model, x)
    torch.compiler.reset()
    monkeypatch.setattr(searches, "Planner", broken)
    with pytest.warns(PlannerWarning, match="the planner broke"):
        assert_same(train(compiled(memory_budget="min"), model, x), expected)


def test_torchs_own_partition_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(3)
    used: list[int] = []
    own = joint_graph.torch_partition

    def count(*args: Any, **kwargs: Any) -> Any:
        used.append(1)
        return own(*args, **kwargs)

    monkeypatch.setattr(searches, "Planner", broken)
    monkeypatch.setattr(joint_graph, "extract_modules", broken)
    monkeypatch.setattr(joint_graph, "torch_partition", count)
    with pytest.warns(PlannerWarning):
        actual = train(compiled(memory_budget="min", compiler="eager"), model, x)
    assert_same(actual, train(lambda m: m, model, x))
    assert used == [1]


# -- plans and reports on disk ----------------------------------------------------------------------------------------


def plan_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.plan.json"))


def test_a_plan_is_written_and_replayed(tmp_path: Path) -> None:
    model, x = small(6)
    options = {"memory_budget": "min", "compiler": "eager", "plan_dir": str(tmp_path / "plans")}
    train(compiled(**options), model, x)
    (first,) = compile_remat.reports()
    (path,) = plan_files(tmp_path / "plans")
    assert path.name == f"{first.graph_key}.plan.json"
    written = path.read_text()
    torch.compiler.reset()
    actual = train(compiled(**{**options, "memory_budget": "max"}), model, x)
    assert_same(actual, train(lambda m: m, model, x))
    second = compile_remat.reports()[-1]
    assert (first.status != "REPLAYED", second.status) == (True, "REPLAYED")
    assert (second.plan.saved, second.plan.peak_bytes) == (first.plan.saved, first.plan.peak_bytes)
    assert path.read_text() == written


def test_the_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    options = {"memory_budget": "min", "compiler": "eager", "plan_dir": str(tmp_path)}
    train(compiled(**options), *small(2))
    (ours,) = plan_files(tmp_path)
    train(compiled(**options), *small(3))
    (other,) = set(plan_files(tmp_path)) - {ours}
    ours.write_text(other.read_text())
    torch.compiler.reset()
    with pytest.raises(PlanMismatchError, match=f"{other.name.split('.')[0]}.*this graph is {ours.name.split('.')[0]}"):
        train(compiled(**options), *small(2))


DAMAGE: dict[str, bytes | dict[str, Any]] = {
    "empty": b"",
    "a list": b"[]",
    "no JSON": b"{not json",
    "an object without fields": b"{}",
    "very deep": b"[" * 100_000 + b"]" * 100_000,
    "no text": b"\xff\xfe\x00",
    "a later schema": {"schema": 99},
    "no schema": {"schema": None},
    "nothing for the saved": {"saved": None},
    "an object for the saved": {"saved": {}},
    "lists among the saved": {"saved": [["a"]]},
    "a number for the saved": {"saved": 3},
    "objects among the copies": {"again": [{}]},
    "numbers among the largest": {"largest": [3]},
    "an unknown status": {"status": "NEW"},
}
"""By name, the content of a plan's file, or the fields that differ from a sound one."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plan_or_one_of_another_version_is_refused(damage: str, tmp_path: Path) -> None:
    options = {"memory_budget": "min", "compiler": "eager", "plan_dir": str(tmp_path)}
    train(compiled(**options), *small())
    (path,) = plan_files(tmp_path)
    content = DAMAGE[damage]
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content}).encode()
    path.write_bytes(content)
    torch.compiler.reset()
    with pytest.raises(PlanMismatchError, match=rf"{path.name}(.|\n)*Delete it"):
        train(compiled(**options), *small())


# -- the cache key ----------------------------------------------------------------------------------------------------


def made(plan_dir: Path | None = None, budget: object = "2MiB", device: str = "cpu") -> RematPartitioner:
    folder = None if plan_dir is None else str(plan_dir)
    return RematPartitioner(
        Settings(MemoryBudget.parse(budget), load_device(device), plan_dir=folder),
        sources_hash=partitioner.sources_hash(),
        plans_hash=partitioner.hash_of_plans(folder),
    )


def test_uuid_is_stable_and_changes_with_pinned_plans(tmp_path: Path) -> None:
    assert made().uuid() == made().uuid()
    empty = made(tmp_path).uuid()
    (tmp_path / "0.plan.json").write_text("{}")
    one = made(tmp_path).uuid()
    (tmp_path / "0.plan.json").write_text("[]")
    assert len({repr(key) for key in (made().uuid(), empty, one, made(tmp_path).uuid())}) == 4


def test_uuid_follows_what_torch_lets_run_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TF32 switches set the price of convolutions on a GPU, and torch's own key lacks cuDNN's switch."""
    keys = set()
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        keys.add(repr(made(device="h200").uuid()))
    assert len(keys) == 2


def test_where_reports_go_is_not_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = entered(monkeypatch)[0]
    assert pickle.dumps(entered(monkeypatch, options={"report_dir": str(tmp_path)})[0]) == pickle.dumps(plain)


@pytest.mark.parametrize(("options", "level"), [({}, logging.CRITICAL), ({"log": "info"}, logging.INFO)])
def test_the_log_level_is_set_only_where_it_is_given(
    options: dict[str, str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("compile_remat")
    monkeypatch.delenv("REMAT_LOG", raising=False)
    monkeypatch.setattr(logger, "level", logging.CRITICAL)  # the user's
    torch.compile(torch.sin, backend=remat, options={"compiler": "eager", **options})(torch.ones(2))
    assert logger.level == level


def test_a_refused_budget_leaves_nothing_of_the_model_in_memory() -> None:
    """After the error, a user may go on with a smaller batch: the refused model must not stay on the device."""

    def refused() -> list[weakref.ref[nn.Parameter]]:
        model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), torch.randn(256, 64)
        call = torch.compile(model, backend=remat, options={"memory_budget": "1KiB", "compiler": "eager"})
        for _ in range(2):
            with pytest.raises(BudgetError) as caught:
                call(x)
            assert caught.value.graph_key and caught.value.floor_bytes > 1024
        return [weakref.ref(parameter) for parameter in model.parameters()]

    weights = refused()
    gc.collect()
    assert [weight() for weight in weights if weight() is not None] == []
