"""A forward and its backward, run dry and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from compile_remat.compilation.region_run import RegionRun, run_region
from compile_remat.cost_models import Reservation, reservation_of
from compile_remat.inductor.observe import Emitted

KIB = 1024
MIB = 1 << 20

ALLOCATE = "empty_strided_cpu((16, 16), (16, 1), torch.float32)"


def emitted(lines: Sequence[str], names: Sequence[str], outputs: int, *, backward: bool) -> Emitted:
    source = "\n".join(["def call(args):", *(f"    {line}" for line in lines)])
    return Emitted(source, tuple(torch.empty(16, 16) for _ in names), tuple(names), outputs, backward)


def forward_returning(*values: str) -> Emitted:
    lines = ["x, = args", f"a = {ALLOCATE}", f"b = {ALLOCATE}", f"return ({', '.join(values)},)"]
    return emitted(lines, ["primals_1"], len(values), backward=False)


BACKWARD = ["p, s, t = args", f"g = {ALLOCATE}", "del s", f"h = {ALLOCATE}", "return (h,)"]
NAMES = ["primals_1", "a", "tangents_1"]


def test_what_is_saved_counts_until_it_is_dropped_and_outputs_to_the_end() -> None:
    backward = emitted(BACKWARD, NAMES, 1, backward=True)
    # b is the user's: 1 KiB to the end; a, saved, makes room for h.
    assert run_region(forward_returning("b", "x", "a"), backward).peak_bytes == 3 * KIB
    # a is the user's as well, so dropping it frees nothing, and t, which comes in for it, is alive beside it.
    assert run_region(forward_returning("a", "x", "a"), backward).peak_bytes == 4 * KIB
    dropping = emitted(["p, s, t = args", "del t", *BACKWARD[1:]], NAMES, 1, backward=True)
    assert run_region(forward_returning("a", "x", "a"), dropping).peak_bytes == 3 * KIB
    # a saved input frees nothing either and does not count.
    assert run_region(forward_returning("b", "x", "x"), backward).peak_bytes == 3 * KIB


def test_two_views_of_one_saved_buffer_count_once() -> None:
    lines = ["p, s, u, t = args", "del s", f"g = {ALLOCATE}", "del u", "return (g,)"]
    backward = emitted(lines, ["primals_1", "a", "view", "tangents_1"], 1, backward=True)
    forward = forward_returning("b", "x", "a", "reinterpret_tensor(a, (256,), (1,), 0)")
    assert run_region(forward, backward).peak_bytes == 3 * KIB


def test_the_events_of_both_make_one_run() -> None:
    """The backward frees what the forward saved; what neither frees is left at the end, when the step lets go of it."""
    run = run_region(forward_returning("b", "x", "a"), emitted(BACKWARD, NAMES, 1, backward=True))
    assert [nbytes for _, nbytes in run.events] == [KIB, KIB, KIB, 0, KIB, 0]
    a, b, g, freed, h, dropped = [key for key, _ in run.events]
    assert freed == a and dropped == g and len({a, b, g, h}) == 4
    assert reservation_of(run.events) == Reservation(3 * KIB, 2 * MIB, 2 * MIB)


def test_a_tensor_without_elements_is_no_event() -> None:
    """Attention returns such tensors on GPUs; in the events, 0 bytes say that a buffer is freed."""
    forward = forward_returning("b", "x", "a")
    empty = "    e = empty_strided_cpu((0,), (1,), torch.float32)\n"
    code = forward.source_code.replace("    return", f"{empty}    del e\n{empty}    return")
    run = run_region(replace(forward, source_code=code), emitted(BACKWARD, NAMES, 1, backward=True))
    assert [nbytes for _, nbytes in run.events] == [KIB, KIB, KIB, 0, KIB, 0]


def test_an_output_that_the_backward_reads_is_allocated_once_and_its_tangent_beside_it() -> None:
    run = run_region(forward_returning("a", "x", "a"), emitted(BACKWARD, NAMES, 1, backward=True))
    assert reservation_of(run.events).allocated_peak_bytes == run.peak_bytes == 4 * KIB


def test_the_allocators_options_decide_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    events = (("a", 30 * MIB), ("b", 30 * MIB), ("a", 0), ("c", 31 * MIB))
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    assert RegionRun(60 * MIB, events).reservation.reserved_peak_bytes == 92 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native,expandable_segments:True")
    assert RegionRun(60 * MIB, events).reservation.reserved_peak_bytes == 100 * MIB


def test_on_cuda_the_peak_is_of_blocks_which_may_have_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's tensors of 43 MiB lie in segments of 44, as the rest of 1 MiB is not cut off (measured on an H200)."""
    events = (("a", 43 * MIB), ("b", 43 * MIB), ("a", 0), ("b", 0))
    assert RegionRun(86 * MIB, events).peak_bytes == 86 * MIB
    assert RegionRun(86 * MIB, events, (64 * MIB,), is_cuda=True).peak_bytes == 88 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert RegionRun(86 * MIB, events, (64 * MIB,), is_cuda=True).peak_bytes == 86 * MIB
