"""A budget that holds nowhere is said: once, and only where a step was trained without a graph of ours."""

from __future__ import annotations

import atexit
import copy
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_remat import entry_point
from compile_remat.errors import PlannerWarning

OPTIONS: dict[str, Any] = {"memory_budget": "8MiB", "compiler": "eager"}


@pytest.fixture(autouse=True)
def watch(own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[entry_point.Watch]:
    """As in a process that has called `torch.compile` with the name just now."""
    atexit.unregister(entry_point.WATCH.at_exit)  # of the tests themselves
    entry_point.WATCH.attempts.stop()
    found = entry_point.Watch(None)
    monkeypatch.setattr(entry_point, "WATCH", found)
    yield found
    found.attempts.stop()


class Recurrent(nn.Module):
    """Dynamo gives its forward up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(10, 4), nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.embedding(x))[0].square().mean()  # type: ignore[no-any-return]


TOKENS = torch.arange(6).reshape(3, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


gives_up_lstm = pytest.mark.skipif(
    torch.__version__ >= "2.15", reason="Dynamo breaks the graph around nn.LSTM, and plans what lies beside it"
)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend=entry_point.remat, options=OPTIONS)


def said(step: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in seen if w.category is PlannerWarning and "holds nowhere" in str(w.message)]


@gives_up_lstm
def test_a_forward_that_dynamo_gives_up_is_said_in_its_first_step(watch: entry_point.Watch) -> None:
    call = compiled(Recurrent())
    (text,) = said(lambda: call(TOKENS).backward())
    assert "Dynamo gives up Recurrent.forward: " in text
    assert not said(lambda: (call(TOKENS).backward(), compiled(Recurrent())(TOKENS).backward(), watch.at_exit()))


def _by_method(model: nn.Module) -> nn.Module:
    model.compile(backend=entry_point.remat, options=OPTIONS)
    return model


class Around(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()  # type: ignore[no-any-return]


class Block(nn.Module):
    """Compiled by its own method, which compiles nothing of an `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [compiled, _by_method, lambda model: compiled(model.forward)])
@pytest.mark.parametrize("is_module", [True, False])
def test_a_model_inside_of_another_compilation_is_said(make: Callable[[Any], Any], is_module: bool) -> None:
    model = Block()
    inner = make(model)
    outer: Any = Around(inner) if is_module and isinstance(inner, nn.Module) else lambda x: inner(x).square().mean()
    call = torch.compile(outer, backend="aot_eager")
    (text,) = said(lambda: [call(torch.ones(2, 4)).backward() for _ in range(2)])
    assert "which another backend compiles" in text


def test_what_is_planned_says_nothing(watch: entry_point.Watch) -> None:
    """Also where Dynamo gives up other frames, and where another backend compiles something else."""
    model, other = mlp(), torch.compile(mlp(), backend="aot_eager")
    call, recurrent = compiled(lambda x: model(x).square().mean()), compiled(Recurrent())

    def steps() -> None:
        other(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            call(torch.ones(2, 4))
        call(torch.ones(2, 4)).backward()
        recurrent(TOKENS).backward()
        watch.at_exit()

    assert not said(steps)
    assert watch.has_graph and not any(p._post_accumulate_grad_hooks for p in model.parameters())


@gives_up_lstm
def test_hooks_on_parameters_stand_in_nobodys_way(watch: entry_point.Watch) -> None:
    """The hooks exist from the first attempt to the first gradient: copies and files of the model have none."""
    model = Recurrent()
    compiled(model)(TOKENS)
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
    assert said(lambda: model(TOKENS).backward())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_inference_says_nothing(watch: entry_point.Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_point, "has_gradients", lambda values: False)  # those of other tests

    def run() -> None:
        for context in (torch.no_grad(), torch.enable_grad()):
            with context:
                compiled(Recurrent())(TOKENS)
        watch.at_exit()

    assert not said(run)


def test_what_is_compiled_for_inference_and_trained_as_it_is_says_nothing(watch: entry_point.Watch) -> None:
    model, recurrent, lazy = mlp(), Recurrent(), nn.LazyLinear(3)

    def run() -> None:
        with torch.no_grad():
            for call, x in ((compiled(model), torch.ones(2, 4)), (compiled(recurrent), TOKENS)):
                call(x)
        entry_point.Watch(lazy).attempts.stop()  # it has no parameters yet
        model(torch.ones(2, 4)).sum().backward()
        recurrent(TOKENS).backward()
        watch.at_exit()

    assert not said(run)


@gives_up_lstm
def test_after_a_reset_of_dynamos_it_is_seen_again(watch: entry_point.Watch) -> None:
    """A reset drops the callbacks; they come back with the next function that is compiled, by any backend."""
    torch.compiler.reset()
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    assert said(lambda: compiled(Recurrent())(TOKENS).backward())


def test_a_problem_of_ours_stops_no_compilation(monkeypatch: pytest.MonkeyPatch, watch: entry_point.Watch) -> None:
    def broken(values: object) -> None:
        raise TypeError("another version of torch")

    monkeypatch.setattr(entry_point, "trained_leaves", broken)
    call = compiled(Recurrent())
    assert not said(lambda: call(TOKENS).backward())


# -- the end of a process ---------------------------------------------------------------------------------------------

START = """
import torch, compile_remat
from compile_remat import entry_point
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
options = {"memory_budget": "8MiB", "compiler": "eager"}
x = torch.ones(2, 4)
def never_tried():
    net.compile(backend=lambda *given, **others: entry_point.remat(*given, **others), options=options)
    torch.compiler.set_stance("force_eager")  # as in versions where torch compiles nothing of an nn.Sequential
"""

ENDS: dict[str, tuple[str, int]] = {
    "training": ("never_tried(); [net(x).sum().backward() for _ in range(2)]", 1),
    "training, in a function": ("never_tried()\ndef main():\n    net(x).sum().backward()\nmain()", 1),
    "an error": ("never_tried(); net(x).sum().backward(); raise ValueError", 0),
    "inference": ("never_tried(); net(x)", 0),
    "a plan": ("torch.compile(net, backend=entry_point.remat, options=options)(x).sum().backward()", 0),
    "a fork": (
        "import os\nnever_tried(); net(x).sum().backward()\nif os.fork(): os.wait(); os._exit(0)",
        0,
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "training" else pytest.mark.full) for case in ENDS]
)
def test_the_end_of_a_process(case: str) -> None:
    script, count = ENDS[case]
    found = subprocess.run([sys.executable, "-c", START + script], capture_output=True, text=True, env=os.environ)
    assert found.stderr.count("PlannerWarning: compile_remat: memory_budget holds nowhere") == count, found.stderr
    assert (found.returncode == 0) == (case != "an error")


@pytest.mark.full
@pytest.mark.parametrize(
    "script",
    [
        "import compile_remat",
        "import compile_remat.backend",
        "import torch\nfrom compile_remat import explain\n"
        "m = torch.nn.Linear(4, 4); explain(m, torch.ones(2, 4)); m(torch.ones(2, 4)).sum().backward()",
    ],
)
def test_nobody_who_has_not_asked_for_the_backend_is_told(script: str) -> None:
    script += "\nimport sys; assert 'compile_remat.entry_point' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert found.returncode == 0 and "holds nowhere" not in found.stderr, found.stderr
