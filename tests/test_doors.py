"""Every setting, given to every function of the public interface, changes the plan or its bytes, or is said to do nothing."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.compilation import looking
from compile_remat.config import RematConfig
from compile_remat.device import free_memory
from compile_remat.doors import LEFT_ASIDE
from compile_remat.forecast import target_step
from compile_remat.planning import pipeline

CHANGED: dict[str, Any] = {
    "memory_budget": "min",
    "device": "h100-sxm",
    "capacity": "2GiB",
    "reserve": "20%",
    "optimizer_state": "64MiB",
    "instances": 2,
    "cost_model": "unit",
    "compiler": "inductor",
    "mode": "max-autotune-no-cudagraphs",
    "check": True,
    "time_limit": 3,
    "gradients": "early",
    "oom_retry": 2,
    "slices": "auto",
    "offload": "auto",
    "host_memory": "64MiB",
    "inputs": "constant",
    "joint_passes": (print,),
    "narrow": "auto",
    "rank_timeout": 5,
    "report_dir": "reports",
    "plan_dir": "plans",
    "log": "info",
}
"""A value of each setting that is not its default."""

BASE: dict[str, Any] = {"capacity": "1GiB", "compiler": "eager"}
"""The settings beside: under `auto` the bytes of a CPU are known, and no graph is lowered."""

BUILDER = f"{__name__}:net"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).pow(2).mean()


def net(batch: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Net(), (torch.randn(batch, 64),)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Everything that planning was asked: settings, requests and contexts, in words."""
    found: list[str] = []

    def noted(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def noting(graph: Any, settings: Any, request: Any, context: Any, **others: Any) -> Any:
            found.append(f"{settings} {request} {replace(context, searches=None)}")
            return prepare(graph, settings, request, context, **others)

        return noting

    monkeypatch.setattr(free_memory, "resident_bytes", lambda: 256 << 20)
    monkeypatch.setattr(free_memory, "host_free_bytes", lambda: 64 << 30)
    for module in (pipeline, target_step):
        monkeypatch.setattr(module, "prepare", noted(module.prepare))
    planned_graph = looking.planned_graph

    def noting(*arguments: Any, observes: bool, **others: Any) -> Any:
        *_, options = arguments
        found.append(f"{options} {observes}")
        return planned_graph(*arguments, observes=False, **others)

    monkeypatch.setattr(looking, "planned_graph", noting)
    monkeypatch.setattr("compile_remat.api.show_from", lambda level: found.append(f"log {level}"))
    yield found


def explained(**settings: Any) -> str:
    return str(compile_remat.explain(Net(), torch.randn(8, 64), **settings).budget_bytes)


def planned(**settings: Any) -> str:
    return str(compile_remat.plan(Net(), torch.randn(8, 64), **settings).budget_bytes)


def frontier(**settings: Any) -> str:
    return str(len(compile_remat.pareto(Net(), torch.randn(8, 64), points=3, **settings)))


def planned_by_name(**settings: Any) -> str:
    return str(compile_remat.plan(BUILDER, **_by_name(settings)).budget_bytes)


def batch(**settings: Any) -> str:
    found = compile_remat.largest_batch(net, **_by_name(settings))
    return f"{found.batch} {found.total_bytes}"


def rank(**settings: Any) -> str:
    found = json.loads(compile_remat.plan_rank(net, "dp=2", **_by_name(settings)).to_json())
    return str({name: value for name, value in found.items() if name != "seconds"})


def _by_name(settings: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in settings.items() if name != "compiler" or value != BASE["compiler"]}
    return {"device": "cpu", **settings} | {"estimate": True}


def installed(**settings: Any) -> str:
    """The partitioner that Inductor gets; nothing is compiled."""
    settings = {name: value for name, value in settings.items() if name != "compiler" or value != BASE["compiler"]}
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compile_remat.api.set_global_partitioner", lambda given, *_, **__: found.append(str(given)))
        patch.setattr("compile_remat.api.write_to", lambda folder: found.append(str(folder)))
        compile_remat.install(**settings)
    return str(found)


FUNCTIONS: dict[str, Callable[..., str]] = {
    "explain": explained,
    "plan": planned,
    "pareto": frontier,
    "plan by name": planned_by_name,
    "largest_batch": batch,
    "plan_rank": rank,
    "install": installed,
}


def test_every_setting_has_a_row() -> None:
    names = {row.name for row in fields(RematConfig)}
    assert set(CHANGED) == names, "give the setting a value that is not its default in CHANGED of tests/test_doors.py"
    assert set(LEFT_ASIDE) == set(FUNCTIONS)
    assert all(set(names) <= set(CHANGED) for names in LEFT_ASIDE.values())


BEFORE: dict[str, list[str]] = {}
"""Results of the functions under `BASE`, by function."""


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_setting_is_dropped_without_a_word(
    function: str, name: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def asked(**settings: Any) -> tuple[list[str], list[str]]:
        seen.clear()
        forget_warnings()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = FUNCTIONS[function](**settings)
        return [*seen, result], [str(warning.message) for warning in said]

    if function not in BEFORE:
        BEFORE[function], _ = asked(**BASE)
    after, said = asked(**BASE | {name: CHANGED[name]})
    is_said = any(re.search(rf"\b{name} (does nothing|= auto|needs)|^compile_remat: {name} ", text) for text in said)
    place = f"the row {function!r} of LEFT_ASIDE in compile_remat/doors.py"
    assert BEFORE[function] != after or is_said, f"{name} changes nothing in {function} and nobody says so: {place}"
    assert BEFORE[function] == after or not is_said, (
        f"{name} is said to do nothing in {function} and does: {place}; {said}"
    )
