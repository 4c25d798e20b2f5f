"""Kernels that are called one by one are built together; each once, and with the same results as apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import async_compile
from torch._inductor.exc import CppCompileError

from compile_remat.backend import remat
from compile_remat.inductor.cpp_kernels import building
from compile_remat.inductor.cpp_kernels.unit import Kernel, unit_source
from tests.inductor.cpp_kernels.counted import Built

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def adding(amount: float, body: str = "") -> Kernel:
    """Writes its input and `amount` to its output."""
    head = 'extern "C"  void  kernel(const float* in_ptr0,\n                       float* out_ptr0)'
    function = f"{head}\n{{ {body} out_ptr0[0] = in_ptr0[0] + {amount}f; }}\n"
    return Kernel(("const float*", "float*"), HEADER + function)


def called(function: Callable[..., None], value: float) -> float:
    out = torch.zeros(1)
    function(torch.tensor([value]), out)
    return out.item()


@pytest.fixture
def built(own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Records the kernels built from here on; kernels of other tests are not found."""
    return Built(monkeypatch)


def train(memory_budget: str) -> list[torch.Tensor]:
    """Gradients of a small model."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)])
    torch.compile(model, backend=remat, options={"memory_budget": memory_budget})(torch.randn(64, 32)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_a_step_inside_a_budget_is_built_in_a_unit_a_graph(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    together = train("min")
    units = [len(unit) for unit in built.units]
    assert sum(units) >= 8, "the model has too few kernels to say anything"
    assert len(units) <= 2
    monkeypatch.setattr(Kernel, "can_share", False)
    built.forget()
    apart = train("min")
    assert len(built.units) == len(units), "no unit is for kernels that are built apart"
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_a_second_process_finds_every_kernel(built: Built) -> None:
    first, second = adding(1.0), adding(2.0)
    building.functions_of([first, second])
    assert [len(unit) for unit in built.units] == [2]
    built.forget(keep_notes=True)
    found = building.functions_of([second, adding(3.0)])
    assert [len(unit) for unit in built.units] == [2, 1]
    assert called(found[second], 1.0) == 3.0 and called(found[adding(3.0)], 1.0) == 4.0


@pytest.mark.parametrize("damage", ["note", "library"])
def test_what_is_damaged_is_built_again(built: Built, damage: str) -> None:
    kernel = adding(5.0 if damage == "note" else 6.0)
    building.functions_of([kernel])
    (note,) = built.notes
    note.write_text("[1" if damage == "note" else '["key", "aa/nothing.so", 0]')
    built.forget(keep_notes=True)
    assert called(building.functions_of([kernel])[kernel], 1.0) == (6.0 if damage == "note" else 7.0)
    assert len(built.units) == 2


def test_one_bad_kernel_does_not_spoil_the_others(built: Built) -> None:
    good, bad = adding(7.0), adding(8.0, "nonsense")
    with pytest.raises(CppCompileError):
        building.functions_of([good, bad])
    assert called(building.functions_of([good])[good], 1.0) == 8.0


def test_kernels_with_macros_or_helpers_stand_alone() -> None:
    assert adding(1.0).can_share
    assert not Kernel((), HEADER + '#define A 1\nextern "C" void kernel() {}').can_share
    assert not Kernel((), HEADER + 'extern "C" void f() {}\nextern "C" void kernel() {}').can_share


def test_a_unit_has_each_header_once() -> None:
    source = unit_source([adding(1.0), adding(2.0)])
    assert source.count(HEADER.strip()) == 1 and source.startswith(HEADER.strip())
    assert "void  kernel_0(" in source and "PyInit_kernel_1(" in source


def test_large_graphs_are_built_on_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "get_compile_threads", lambda: 3)
    long = "//" + "x" * (building.UNIT_CHARACTERS // 4) + "\n"
    units = building._units([adding(float(k), long) for k in range(20)])
    assert sorted(len(unit) for unit in units) == [6, 7, 7]
    assert len(building._units([adding(1.0), adding(2.0)])) == 1
    monkeypatch.setattr(building, "get_compile_threads", lambda: 1)
    monkeypatch.setattr(building, "MOST_CHARACTERS", building.UNIT_CHARACTERS)
    assert len(building._units([adding(float(k), long) for k in range(20)])) == 6


def test_what_inductor_calls_is_there() -> None:
    """A canary: the code of a graph calls these methods of ``AsyncCompile``, as `KernelsOfGraph` replaces them."""
    names: Sequence[Any] = [getattr(async_compile.AsyncCompile, name) for name in ("cpp_pybinding", "wait")]
    assert all(callable(name) for name in names)
