"""Steps with tensors on the host have no race, and lose their order without a wait; the command that tries all faults."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch._functorch import config as functorch_config

from tests.correctness.test_offload import MODELS
from tests.races import changes, mutations
from tests.races.clocks import Access, has_race, races, waits
from tests.races.emitted import Kernel
from tests.races.steps import STEPS, Case, Compiled, of_models, one_step, two_backwards
from tests.races.watched import Watch

CPP = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       const float* other,
                       float* out_ptr1,
                       const int64_t ks0)
"""
TRITON = """
@triton_heuristics.pointwise(
    inductor_meta={'mutated_arg_names': ['in_ptr1', 'in_out_ptr0'], 'optimize_mem': True},
)
@triton.jit
def triton_poi_fused_0(in_out_ptr0, in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
"""


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    _, found = next(of_models(0, ["attention"]))
    return found


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_no_race(name: str, compiled: Compiled) -> None:
    trace = compiled.trace(STEPS[name])
    assert list(races(trace)) == []
    ends = Counter(event.label for event in trace if isinstance(event, Access) and event.label in ("take", "free"))
    assert ends["take"] == ends["free"] > 0


def test_each_kind_of_wait_is_missed_unless_another_has_its_effect(compiled: Compiled) -> None:
    kinds, found = set[str](), set[str]()
    for step in STEPS.values():
        trace = compiled.trace(step)
        for wait in waits(trace):
            kinds.add(wait.kind)
            if has_race(trace, [wait.number]):
                found.add(wait.kind)
    assert kinds <= set(changes.WAITS)
    assert {changes.WAITS[kind] for kind in kinds - found} <= set(mutations.HARMLESS)
    assert len(found) >= 6


def test_a_second_backward_of_one_forward_has_no_race() -> None:
    with functorch_config.patch(donated_buffer=False):
        _, compiled = next(of_models(0, ["attention"]))
        trace = compiled.trace(two_backwards)
    assert waits(trace) and not has_race(trace)


def test_the_roles_of_a_kernels_arguments() -> None:
    assert Kernel.cpp(Watch(), CPP).only_read == (False, True, False, False, False)
    assert Kernel.triton(Watch(), TRITON).only_read[:4] == (False, True, False, False)
    for kernel in (Kernel.cpp(Watch(), ""), Kernel.triton(Watch(), "")):
        kernel(torch.zeros(1), 3)
        (access,) = kernel.watch.trace
        assert isinstance(access, Access) and access.writes


@pytest.mark.full
def test_the_command_tries_all_faults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "ENOUGH", 1)
    monkeypatch.setattr(sys, "argv", ["mutations", "--programs", "6"])
    assert mutations.main() == 0
    assert "races without a fault: 0" in capsys.readouterr().out


@pytest.mark.full
def test_random_code_has_no_race_and_passes_the_check() -> None:
    """A convolution that a kernel at the forward's end reads, behind the place at which a plan once had its memory free."""
    found = 0
    for seed in range(100, 108):
        case = Case(lambda: (MODELS["convolutions"]()[0], (torch.randn(4, 8, 16, 16),)), seed)
        for options in ({}, changes.FREE_OPTIONS):
            compiled = case.compiled(options=options)
            assert not compiled.is_refused and not has_race(compiled.trace(one_step))
            found += compiled.moves
    assert found
