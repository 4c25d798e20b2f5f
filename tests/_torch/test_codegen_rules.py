"""One test for each rule of `InductorRules`: it lowers a tiny graph and looks at the buffers that Inductor makes.

A failure means that Inductor changed the rule that the test is named after, and that the memory model is wrong for this
torch until `inductor_rules` says so.  No code is emitted, and no GPU is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config, ir, scheduler
from torch._inductor.choices import InductorChoices
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch import sizes
from compile_remat._torch.codegen_rules import UNARY_OPS, inductor_rules
from compile_remat._torch.fake import say_device
from compile_remat._torch.version import torch_version

DEVICES = ("cpu", "cuda")
aten = torch.ops.aten


def lowered(function: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cpu") -> GraphLowering:
    """Inductor's IR for a function of float32 tensors."""
    with FakeTensorMode() as mode:
        module = make_fx(function)(*map(torch.empty, shapes))
    if device != "cpu":
        say_device(module, torch.device(device, 0))
    graph = GraphLowering(module)
    with V.set_graph_handler(graph), V.set_fake_mode(mode):
        graph.run(*[n.meta["val"] for n in module.graph.find_nodes(op="placeholder")])  # type: ignore[no-untyped-call]
    return graph


def buffers(function: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cpu") -> int:
    """The number of buffers that are computed, results included."""
    return sum(
        isinstance(o, ir.ComputedBuffer | ir.ExternKernel) for o in lowered(function, *shapes, device=device).operations
    )


def read_once(b: Tensor, *parts: Tensor) -> Tensor:
    return reduce(operator.add, parts) * b


def read_twice(b: Tensor, c: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    total = reduce(operator.add, parts)
    return total * b, total * c


# -- what is materialised ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_max_reads(device: str) -> None:
    limit = inductor_rules(device).max_reads
    assert buffers(read_once, *[(8,)] * (limit + 1), device=device) == 1
    assert buffers(read_once, *[(8,)] * (limit + 2), device=device) == 2


@pytest.mark.parametrize("device", DEVICES)
def test_max_reads_if_reused(device: str) -> None:
    limit = inductor_rules(device).max_reads_if_reused
    assert buffers(read_twice, *[(8,)] * (limit + 2), device=device) == 2
    assert buffers(read_twice, *[(8,)] * (limit + 3), device=device) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_heavy_ops(device: str) -> None:
    def materialised(name: str) -> bool:
        def twice(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            heavy = getattr(torch, name)(a)
            return heavy * b, heavy * c

        return buffers(twice, (8,), (8,), (8,), device=device) == 3

    heavy = inductor_rules(device).heavy_ops
    assert heavy == tuple(name for name in UNARY_OPS if materialised(name))
    few, many = ("exp", "sigmoid"), ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
    assert heavy == ((few if torch_version() < (2, 13) else many) if device == "cpu" else ())


@pytest.mark.parametrize("device", DEVICES)
def test_strided_readers(device: str) -> None:
    def by_strides(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).as_strided((4, 2), (2, 1)).cos()

    def by_shape(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).view(4, 2).cos()

    assert "aten.as_strided.default" in inductor_rules(device).strided_readers
    assert buffers(by_strides, (8,), (8,), device=device) == 2
    assert buffers(by_shape, (8,), (8,), device=device) == 1


def test_drawn_ops() -> None:
    """The seeds, what is drawn with the first of them, and the product."""

    def drawn(a: Tensor) -> Tensor:
        seeds = torch.ops.prims.inductor_seeds.default(1, a.device)
        seed = torch.ops.prims.inductor_lookup_seed.default(seeds, 0)
        return a * torch.ops.prims.inductor_random.default([8], seed, "rand")

    assert inductor_rules("cpu").drawn_ops == ("inductor_random",)
    assert buffers(drawn, (8,)) == 3


# -- concatenations, layouts, poolings --------------------------------------------------------------------------------


def of_values(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a * 2, b * 3]).sin()


def of_buffers(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a.sum(1), b.sum(1)]).sin()


@pytest.mark.parametrize("device", DEVICES)
def test_always_concatenates(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def concatenates(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> bool:
        return any(isinstance(o, ir.ConcatKernel) for o in lowered(function, *shapes, device=device).operations)

    assert concatenates(of_values, (8,), (8,)) == inductor_rules(device).always_concatenates
    # Inductor would ask the GPU for its size.
    monkeypatch.setattr(ir.Reduction, "num_splits", lambda *_, **__: (ir.ReductionHint.DEFAULT, 1))
    assert concatenates(of_buffers, (8, 64), (8, 64))


def test_what_is_concatenated_is_written_into_its_place() -> None:
    """A value that a kernel computes is written into the first concatenation that reads it; a graph input is copied."""

    def twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        part = a.exp()
        return torch.cat([part, b]), torch.cat([b, part])

    parts = [o for o in lowered(twice, (8,), (8,)).operations if isinstance(o, ir.ComputedBuffer)]
    assert len(parts) == 4 and all(isinstance(p.layout, ir.NonOwningLayout) for p in parts)
    assert [len(p.get_read_names()) for p in parts] == [1, 1, 1, 1]


def test_concatenates_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: a part that something else reads is written into the concatenation, where that has a buffer."""

    def skip(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        part = a.exp()
        return torch.cat([part, b]).sum(0), part.sum(0)

    def alone(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a.exp(), b]).sum(0)

    def concatenates(function: Callable[..., Any]) -> bool:
        return any(isinstance(o, ir.ConcatKernel) for o in lowered(function, (8, 8), (8, 8), device="cuda").operations)

    monkeypatch.setattr(ir.Reduction, "num_splits", lambda *_, **__: (ir.ReductionHint.DEFAULT, 1))
    assert concatenates(skip) == inductor_rules("cuda").concatenates_shared and not concatenates(alone)


SCATTERED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "_unsafe_index_put": lambda x, i, v: aten._unsafe_index_put(x, [i], v, True),
    "_unsafe_masked_index_put_accumulate": lambda x, i, v: aten._unsafe_masked_index_put_accumulate(x, i > 1, [i], v),
    "index_put": lambda x, i, v: aten.index_put(x, [i], v, True),
    "scatter_add": lambda x, i, v: aten.scatter_add(x, 0, i, v),
    "scatter": lambda x, i, v: aten.scatter(x, 0, i, v),
}


@pytest.mark.parametrize(("device", "threads"), [("cuda", 2), ("cpu", 1), ("cpu", 2)])
@pytest.mark.parametrize("name", SCATTERED)
def test_scatters(name: str, device: str, threads: int) -> None:
    """A kernel fills the buffer, another adds to it what it computes; a type without atomic additions calls ATen's operator,
    but for elements that are written and not added, in C++, and from 2.15 on for those that an index adds there (`lowering.py`,
    `index_put_impl_`).  The rule says nothing of that: no gradient is of integers."""
    convert = torch.ops.prims.convert_element_type.default

    def operations(dtype: torch.dtype) -> list[Any]:
        def scattered(x: Tensor, i: Tensor, v: Tensor) -> Tensor:
            return SCATTERED[name](convert(x, dtype), convert(i, torch.int64), convert(v, dtype))

        return lowered(scattered, (16,), (8,), (8,), device=device).operations

    with config.patch({"cpp.threads": threads}):
        rules = inductor_rules(device)
        is_called = device == "cpu" and threads > 1 and name == "scatter_add"
        assert (name in rules.scatters) != is_called
        assert torch.int64 in rules.unfused_scatter_dtypes and torch.float32 not in rules.unfused_scatter_dtypes
        adds_integers = device == "cpu" and (name == "scatter" or ("index_put" in name and torch_version() >= (2, 15)))
        assert _calls_aten(operations(torch.int64)) or adds_integers
        assert _calls_aten(operations(torch.float32)) == is_called
        if not is_called:
            fill, scatter = operations(torch.float32)
            assert isinstance(fill.data, ir.Pointwise) and isinstance(scatter.data, ir.Scatter)
            assert isinstance(scatter.layout, ir.MutationLayoutSHOULDREMOVE)


def _calls_aten(operations: list[Any]) -> bool:
    return any(isinstance(o, ir.ScatterFallback | ir.IndexPutFallback) for o in operations)


@pytest.mark.parametrize("is_on", [True, False])
def test_has_channels_last(is_on: bool) -> None:
    def convolution(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv2d(x, w)

    with config.patch(layout_optimization=is_on):
        rules = inductor_rules("cpu")
        module = make_fx(convolution)(torch.empty(1, 4, 8, 8), torch.empty(4, 4, 3, 3))
        assert GraphLowering.decide_layout_opt(module, is_inference=False) == rules.has_channels_last
    assert not inductor_rules("cuda").has_channels_last


@pytest.mark.parametrize("operator_name", ["avg_pool2d_backward", "max_pool2d_with_indices_backward"])
def test_max_pooling_window(operator_name: str) -> None:
    def pooled(size: int) -> Callable[[Tensor, Tensor], Tensor]:
        def backward(gradient: Tensor, x: Tensor) -> Tensor:
            if operator_name.startswith("avg"):
                return aten.avg_pool2d_backward(gradient, x, [size, 1], [1, 1], [0, 0], False, True, None)
            places = aten.full(gradient.shape, 0, dtype=torch.int64, device=gradient.device)
            return aten.max_pool2d_with_indices_backward(gradient, x, [size, 1], [1, 1], [0, 0], [1, 1], False, places)

        return backward

    def calls_aten(size: int) -> bool:
        graph = lowered(pooled(size), (1, 1, 65 - size, 8), (1, 1, 64, 8))
        return any(isinstance(o, ir.FallbackKernel) for o in graph.operations)

    limit = inductor_rules("cpu").max_pooling_window
    assert not calls_aten(limit) and calls_aten(limit + 1)


def test_draws_by_kernel() -> None:
    """From 2.13 on what is drawn depends on the kernel, unless numbers are those of eager mode."""
    assert not inductor_rules("cpu").draws_by_kernel
    assert inductor_rules("cuda").draws_by_kernel == (torch_version() >= (2, 13))
    if torch_version() >= (2, 13):
        with config.patch(align_random_eager=True):
            assert not inductor_rules("cuda").draws_by_kernel


# -- the user's options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "padded"), [(1024, 1024), (1100, 1120)])
def test_padded_above(columns: int, padded: int) -> None:
    """On a GPU rows are padded, also those of the graph's outputs, unless the user sees the output."""
    rules = inductor_rules("cuda")
    assert inductor_rules("cpu").padded_above is None and rules.padded_above is not None
    graph = lowered(lambda a: a * 2, (3, 8, columns), device="cuda")
    assert [list(o.get_stride()) for o in graph.operations] == [[8 * padded, padded, 1]]  # type: ignore[attr-defined]
    counted = sizes.padded_nbytes(torch.empty(3, 8, columns), rules.padded_above, rules.padding_bytes)
    assert counted == 4 * (23 * padded + columns)


def test_gradients_read_eager_strides() -> None:
    """Before 2.13 a convolution's backward has no lowering of its own: its kernel gets operands with eager mode's strides."""
    lowering = torch._inductor.lowering.lowerings[aten.convolution_backward.default]
    for device in DEVICES:
        assert hasattr(lowering, "_is_fallback_handler") == inductor_rules(device).gradients_read_eager_strides


def test_unrolled_below() -> None:
    """A reduction over few elements becomes pointwise; without a GPU, Inductor cannot be asked for a GPU's limit."""
    limit = inductor_rules("cpu").unrolled_below
    for rows, is_unrolled in ((limit - 1, True), (limit, False)):
        (operation,) = lowered(lambda a: a.sum(0), (rows, 64), device="cpu").operations  # type: ignore[attr-defined]
        assert (operation.get_reduction_type() is None) == is_unrolled
    (operation,) = lowered(lambda a: a.sum(0), (limit - 1, 1), device="cpu").operations  # type: ignore[attr-defined]
    assert (operation.get_reduction_type() is None) == inductor_rules("cpu").unrolls_to_one
    assert inductor_rules("cuda").unrolled_below == limit
    assert inductor_rules("cuda").unrolls_to_one


WINDOWS: dict[str, Callable[[Tensor], Any]] = {
    "_low_memory_max_pool_with_offsets": lambda x: torch.ops.prims._low_memory_max_pool_with_offsets.default(
        x, [2, 2], [2, 2], [0, 0], [1, 1], False
    ),
    "avg_pool2d": lambda x: aten.avg_pool2d.default(x, [2, 2]),
    "avg_pool2d_backward": lambda x: aten.avg_pool2d_backward.default(x, x, [3, 3], [1, 1], [1, 1], False, True, None),
    "_adaptive_avg_pool2d": lambda x: aten._adaptive_avg_pool2d.default(x, [8, 8]),
    "upsample_nearest2d": lambda x: aten.upsample_nearest2d.vec(x, [32, 32], None),
    "upsample_nearest2d_backward": lambda x: aten.upsample_nearest2d_backward.default(x, [16, 16], [1, 2, 8, 8]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_window_readers(name: str) -> None:
    """A sum of two buffers is written before them, and a function of one buffer is not."""
    assert name in inductor_rules("cpu").window_readers
    shape = (1, 2, 16, 16)
    of_one, of_two = (
        buffers(lambda *xs: WINDOWS[name](reduce(operator.add, xs).sin()), *[shape] * count) for count in (1, 2)
    )
    assert of_two == of_one + 1


@pytest.mark.parametrize(("multiprocessors", "major"), [(132, 9), (108, 8), (148, 10)], ids=["H100", "A100", "B200"])
def test_split_below(multiprocessors: int, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor asks a GPU of this size whether it splits a reduction, and gets one part for each other number of results."""
    figures = DeviceProperties(
        "cuda", 0, multiprocessors, 10 * major, major=major, max_threads_per_multi_processor=2048, warp_size=32
    )
    monkeypatch.setattr(DeviceProperties, "create", lambda device: figures)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    of_torch = SimpleNamespace(multi_processor_count=multiprocessors, major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: of_torch)
    rules = inductor_rules("cuda")

    def is_split(length: int, num_results: int) -> bool:
        factor = InductorChoices.reduction_split_factor(torch.device("cuda", 0), length, num_results, True)
        return factor > 1

    assert is_split(rules.unsplit_length + 1, rules.split_below - 1)
    assert not is_split(rules.unsplit_length, rules.split_below - 1)
    assert not is_split(rules.unsplit_length + 1, rules.split_below)
    with config.patch(split_reductions=False):
        assert inductor_rules("cuda").split_below == 0


def test_without_a_gpu_reductions_are_split_as_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (inductor_rules("cuda").split_below, inductor_rules("cuda").unsplit_length) == (264, 8192)


def test_mixes_reductions() -> None:
    assert not inductor_rules("cpu").mixes_reductions
    has_them = hasattr(scheduler, "MixOrderReduction")
    for is_on in (False, True) if has_them else ():
        with config.patch({"triton.mix_order_reduction": is_on}):
            assert inductor_rules("cuda").mixes_reductions == is_on
    assert has_them or not inductor_rules("cuda").mixes_reductions


def test_the_users_thresholds_count() -> None:
    with config.patch(realize_reads_threshold=2, realize_acc_reads_threshold=3):
        for device in DEVICES:
            rules = inductor_rules(device)
            assert (rules.max_reads_if_reused, rules.max_reads) == (2, 3)
            assert buffers(read_once, *[(8,)] * 5, device=device) == 2
    assert inductor_rules("cpu").max_reads_if_reused == 4
