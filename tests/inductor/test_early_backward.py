"""A backward that is compiled with its forward: the same graph, inputs and options that torch asks for later."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import compile_fx as inductor

from compile_remat.inductor import early_backward
from compile_remat.inductor.early_backward import PartitionRecorder
from compile_remat.inductor.entry import compile_with_partitioner
from compile_remat.inductor.observe import Emitted
from tests.inductor.light_code.emitting import TorchsOwn


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.2)


def convolutions() -> nn.Module:
    """Inductor gives the forward's outputs other strides than the graph says: channels last."""
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())


def step(module: nn.Module, x: torch.Tensor, seen: Callable[[Emitted], None], *, dynamic: bool = False) -> Any:
    """A compiled forward; returns the loss."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_with_partitioner(gm, inputs, TorchsOwn(1.0), {}, guarded=False, observer=seen)

    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        return torch.compile(module, backend=backend, dynamic=dynamic)(x).sum()


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [(Dropping, (32, 8)), (convolutions, (2, 3, 12, 12))]


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(("make", "shape"), CASES, ids=["dropout", "channels last"])
def test_what_is_compiled_early_is_what_torch_asks_for(
    make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[Any], dict[str, Any]]] = []
    original = inductor.compile_fx_inner

    def record(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            strides = [(tuple(x.shape), x.stride(), x.dtype) for x in inputs]
            asked.append((str(gm.graph), strides, {k: str(v) for k, v in options.items()}))
        return original(gm, inputs, **options)

    monkeypatch.setattr(inductor, "compile_fx_inner", record)
    conditions = early_backward._conditions
    monkeypatch.setattr(
        early_backward, "_conditions", lambda *args: (object(), conditions(*args))
    )  # none is like another
    emitted: list[Emitted] = []
    step(make(), torch.randn(shape), emitted.append).backward()
    early, late = asked
    assert early == late
    forward, first, second = emitted
    assert (forward.is_backward, first.is_backward, second.is_backward) == (False, True, True)
    assert _body(first) == _body(second)


def _body(emitted: Emitted) -> str:
    """The code from the wrapper's first line on: above it stand comments about where it was made."""
    return emitted.source_code[emitted.source_code.index("def call(") :]


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_graph_is_compiled_once(*, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []
    original = inductor.compile_fx_inner

    def record(*args: Any, **options: Any) -> Any:
        compiled.append(bool(options.get("is_backward")))
        return original(*args, **options)

    monkeypatch.setattr(inductor, "compile_fx_inner", record)
    emitted: list[Emitted] = []
    loss = step(Dropping(), torch.randn(32, 8), emitted.append, dynamic=dynamic)
    assert compiled == [e.is_backward for e in emitted] == [False, True]  # before any backward runs
    loss.backward()
    assert len(compiled) == 2


@pytest.mark.usefixtures("empty_kernels")
def test_nothing_of_torch_is_replaced_meanwhile() -> None:
    modules = (graph_compile, inductor, functorch_config)
    before = [dict(vars(module)) for module in modules]
    lazy = functorch_config.force_non_lazy_backward_lowering
    during: list[bool] = []

    def look(emitted: Emitted) -> None:
        same = all(vars(m).get(k) is v for m, names in zip(modules, before, strict=True) for k, v in names.items())
        during.append(same and functorch_config.force_non_lazy_backward_lowering is lazy)

    step(Dropping(), torch.randn(32, 8), look)
    assert during == [True, True]


def test_what_is_called_is_as_we_know_it() -> None:
    """On every version of torch: the names that stand in for values that only AOTAutograd has."""
    parameters = list(inspect.signature(inductor.compile_fx_backward).parameters)
    assert parameters == ["gm", "example_inputs", "compiler_config_extra", "inner_compile"]
    fields = {field.name for field in dataclasses.fields(inductor.CompilerConfigExtra)}
    known = {"cudagraphs", "graph_id", "forward_device", "forward_is_partitioned", "cudagraphs_bwd_override"}
    from_2_15 = {"forward_device_index", "forward_is_cudagraph_partitioned"}  # two of them under other names
    assert fields <= known | from_2_15
    assert {"output_strides", "aot_graph_name", "fw_metadata"} <= set(vars(torch._guards.TracingContext(None)))


def test_a_recorder_is_the_partitioner_to_torchs_caches() -> None:
    recorder = PartitionRecorder(TorchsOwn(1.0))
    assert recorder.uuid() == TorchsOwn(1.0).uuid()
    assert copy.deepcopy(recorder) is recorder
    graphs = fx.symbolic_trace(nn.ReLU()), fx.symbolic_trace(nn.Tanh())
    recorder.made.append(graphs)
    assert len(pickle.dumps(recorder)) < 200
    assert recorder.backward_of(graphs[1]) is None
    assert recorder.backward_of(graphs[0]) is graphs[1]
    assert recorder.backward_of(graphs[0]) is None
