"""A graph that is read before its code is made: what is read is the code's, and reading leaves nothing behind."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.scan import scan
from torch._inductor import config as inductor_config
from torch._inductor import metrics
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import cpp
from torch._inductor.scheduler import Scheduler, SchedulerNode
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks import models
from compile_remat.errors import PlannerWarning
from compile_remat.inductor.light_code import reading
from compile_remat.inductor.light_code.reading import Lowered
from tests.inductor.light_code.emitting import compiled, in_order, sources


class Layer(nn.Module):
    """Attention and MLP: LayerNorm's statistics and its sum share outer loops in C++."""

    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (y.view(batch, tokens, 2, -1).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def layers(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(*[Layer(dropout=dropout) for _ in range(2)])


def mlp() -> nn.Module:
    """Kernels of each kind in few of them: statistics, a sum over outer loops that are shared, pointwise ones, products."""
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (4, 16, 32))


class Branches(nn.Module):
    """One of two linear layers, by what the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.left(x).sin(), lambda x: self.right(x).cos(), (x.tanh(),))
        return (y * x).sum()


def scanned(x: Tensor, weight: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(F.linear(state, weight) + row), torch.cos(state * row)

    last, rows = scan(step, torch.sin(x[0]), torch.sin(x @ weight))
    return torch.sin(rows).sum() + torch.sin(last).sum()


class Checkpointed(nn.Module):
    """Layers whose calls are regions of the user's own checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU()) for _ in range(2))
        self.last = nn.ModuleList(nn.Linear(128, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, last in zip(self.layers, self.last, strict=True):
            x = x + last(checkpoint(layer, x, use_reentrant=False))
        return x


class Regions(nn.Module):
    """Layers that are traced once and called for each of their uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        @torch.compiler.nested_compile_region
        def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return torch.sin(F.linear(torch.exp(torch.sin(x)), weight, bias)) + x

        for each in self.layers:
            x = torch.sin(layer(x, each.weight, each.bias))
        return x


def jagged() -> Tensor:
    rows = [torch.linspace(-1, 1, 32 * length).reshape(length, 32) for length in (3, 5)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float().sum()


KINDS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]]] = {
    "MLP": lambda: (mlp(), (x(),), {}),
    "MLP in bfloat16": lambda: (mlp().bfloat16(), (x().bfloat16(),), {}),
    "MLP, as Inductor calls kernels": lambda: (mlp(), (x(),), {"guarded": False}),
    "transformer": lambda: (layers(), (x(),), {}),
    "nothing recomputed": lambda: (layers(), (x(),), {"ratio": 1.0}),
    "as Inductor calls kernels": lambda: (layers(), (x(),), {"guarded": False}),
    "dropout": lambda: (layers(0.3), (x(),), {}),
    "bfloat16": lambda: (layers().bfloat16(), (x().bfloat16(),), {}),
    "autocast": lambda: (Autocast(), (x(),), {}),
    "dynamic shapes": lambda: (layers(), (x(),), {"dynamic": True}),
    "cond": lambda: (Branches(), (x(),), {}),
    "scan": lambda: (scanned, (x(6, 4, 8), x(8, 8).requires_grad_()), {}),
    "checkpoints": lambda: (Checkpointed(), (x(),), {}),
    "regions": lambda: (Regions(), (x(),), {}),
    "nested tensors": lambda: (nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), (jagged(),), {}),
    "no in-place kernels": lambda: (layers(), (x(),), {"options": {"inplace_buffers": False}}),
    "no partitions": lambda: (layers(), (x(),), {"options": {"graph_partition": False}}),
    "no vectors": lambda: (layers(), (x(),), {"options": {"cpp.simdlen": 1}}),
}
NOT_UNDERSTOOD = ("scan",)
"""Kinds whose code no dry run follows: it writes into elements of a list."""
ALWAYS = ("MLP", "MLP in bfloat16", "MLP, as Inductor calls kernels")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in ALWAYS else pytest.mark.full) for k in KINDS])
def test_what_is_read_allocates_what_the_code_does(kind: str) -> None:
    function, inputs, options = KINDS[kind]()
    compiled(function, inputs, **options).check(is_understood=kind not in NOT_UNDERSTOOD)


@pytest.mark.full
@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("name", models.CASES)
def test_models_are_read_as_their_code(name: str, ratio: float) -> None:
    case = models.build(name, scale=models.TOY_SCALE)
    compiled(case.module, case.inputs, ratio=ratio).check()


@pytest.mark.full
@pytest.mark.parametrize("name", ("gpt", "resnet", "experts"))
def test_bfloat16_models_are_read_as_their_code(name: str) -> None:
    case = models.build(name, scale=models.TOY_SCALE, dtype="bfloat16")
    compiled(case.module, case.inputs).check()


def test_kernels_and_buffers_have_their_nodes() -> None:
    step = compiled(mlp(), (x(),))
    for graph in step.light:
        buffers = {name for name in graph.nodes_of if name.startswith("buf")}
        kernels = {name for name in graph.nodes_of if name.startswith("kernel_")}
        assert buffers and kernels and all(f"{name} = async_compile" in graph.source_code for name in kernels)
        assert all(graph.nodes_of[name] for name in kernels)


def test_a_buffer_of_many_nodes_is_named_by_what_it_holds() -> None:
    """The first pass of a sum has no single origin, nor has a copy in the layout that a product wants."""

    def function(x: Tensor) -> Tensor:
        y = torch.ops.aten.permute.default(x.sin(), [1, 0])
        return torch.ops.aten.mm.default(y, y).sum() + y.sum()

    module = make_fx(function)(torch.randn(4, 4))
    nodes = {node.name: node for node in module.graph.nodes}

    def buffer(*names: str, origin: str | None = None) -> mock.Mock:
        found = mock.Mock(spec=reading.ExternKernel if origin == "mm" else reading.IRNode)
        found.get_origin_node = lambda: None if origin is None else nodes[origin]
        found.origins = [nodes[name] for name in names]
        return found

    first_pass, product, copy = (
        buffer("sin", "permute", "sum_2"),
        buffer("mm", origin="mm"),
        buffer("mm", "permute", "sin"),
    )
    order = reading._order(SimpleNamespace(buffers=[first_pass, product, copy], graph=module.graph))
    assert reading._names([first_pass], order) == ("sum_2", "sin", "permute")
    assert reading._names([product], order) == ("mm",)
    assert reading._names([copy], order)[0] == "sin"
    assert reading._names([buffer("sin", "permute", origin="permute")], order) == ("permute", "sin")


# -- no trace ---------------------------------------------------------------------------------------------------------


PATCHABLE = (
    (Scheduler, "codegen"),
    (cpp.CppScheduling, "codegen_node"),
    (SchedulerNode, "codegen"),
    (PyCodeCache, "load"),
)


def state() -> dict[str, Any]:
    """State of this process that reading could change."""
    figures = {
        k: sorted(map(str, v)) if isinstance(v, list) else str(v) for k, v in vars(metrics).items() if _is_figure(k, v)
    }
    numbers = {name: dict(counter) for name, counter in counters.items() if counter}
    handlers = [str(getattr(V, name)) for name in ("graph", "kernel", "choices", "local_buffer_context")]
    patched = [getattr(owner, name) for owner, name in PATCHABLE]
    return {
        "metrics": figures,
        "counters": numbers,
        "handlers": handlers,
        "functions": patched,
        "config": {
            k: v for k, v in inductor_config.get_config_copy().items() if isinstance(v, int | float | str | None)
        },
        "modules": len(PyCodeCache.modules),
        "random": random.getstate(),
    }


def _is_figure(name: str, value: Any) -> bool:
    """Of metrics; their lists are in the order of code, which is made for a backward first where graphs are read."""
    return isinstance(value, int | list | set | dict) and not name.startswith("__")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """States before and behind each read of a graph."""
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    read = reading._read

    def seen(graph: Any) -> Lowered | None:
        before = state()
        lowered = read(graph)
        found.append((before, state()))
        assert lowered is not None
        return lowered

    monkeypatch.setattr(reading, "_read", seen)
    yield found


@pytest.mark.parametrize(
    "kind", ["MLP", *(pytest.param(k, marks=pytest.mark.full) for k in ("transformer", "bfloat16"))]
)
def test_reading_leaves_nothing_behind(kind: str, reads: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    function, inputs, options = KINDS[kind]()
    compiled(function, inputs, **options)
    assert len(reads) == 2
    for before, behind in reads:
        assert before == behind


ALIKE = ("transformer", "bfloat16", "dynamic shapes", "cond", "regions", "nested tensors")


@pytest.mark.parametrize("kind", ["MLP", *(pytest.param(k, marks=pytest.mark.full) for k in ALIKE)])
def test_code_behind_a_read_is_the_code_without_one(kind: str) -> None:
    torch.manual_seed(3)
    function, inputs, options = KINDS[kind]()
    metrics.reset()
    plain, plain_figures = compiled(function, inputs, is_read=False, **options), state()["metrics"]
    metrics.reset()
    read, figures = compiled(function, inputs, **options), state()["metrics"]
    assert read.light and not plain.light
    assert sources(read.real) == sources(plain.real)
    assert figures == plain_figures


@pytest.mark.parametrize("refused", ["forward", "backward"])
def test_a_refused_graph_has_no_code_and_the_next_one_is_plain_torchs(refused: str) -> None:
    function, inputs = mlp(), (x(),)
    plain = compiled(function, inputs, is_read=False, guarded=False)
    step = compiled(function, inputs, refused=refused)
    assert not step.real
    assert [graph.is_backward for graph in step.light] == ([False] if refused == "forward" else [False, True])
    after = compiled(function, inputs, is_read=False, guarded=False)
    assert sources(after.real) == sources(plain.real)


def test_the_users_own_passes_run_once_and_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if a graph is read, and its code is made afterwards."""
    ran: list[str] = []

    def before_fusions(nodes: list[Any]) -> list[Any]:
        ran.append(f"before {'backward' if V.graph.is_backward else 'forward'}")
        return nodes

    def behind_fusions(nodes: list[Any]) -> list[Any]:
        ran.append(f"behind {'backward' if V.graph.is_backward else 'forward'}")
        return nodes

    passes = {"_pre_fusion_custom_pass": before_fusions}
    if hasattr(inductor_config, "_post_fusion_custom_pass"):
        passes["_post_fusion_custom_pass"] = behind_fusions
    with inductor_config.patch(passes):
        step = compiled(mlp(), (x(),))
    assert len(step.light) == len(step.real) == 2
    names = ["before", "behind"][: len(passes)]
    assert ran == [f"{name} {graph}" for graph in ("forward", "backward") for name in names]


def test_a_graph_that_cannot_be_read_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: Any) -> Lowered:
        raise AssertionError("this code generator knows no graph")

    monkeypatch.setattr(reading, "read", fail)
    with caplog.at_level("INFO", "compile_remat"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = compiled(mlp(), (x(),))
    assert not step.light and len(in_order(step.real)) == 2
    assert caplog.text.count("the lowered graph cannot be read") == 2
    (warning,) = [each for each in said if each.category is PlannerWarning]  # of a process, not of each graph
    assert "cannot be read" in str(warning.message)
