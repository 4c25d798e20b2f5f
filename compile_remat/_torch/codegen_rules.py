"""Rules of Inductor that the memory model follows: thresholds and lists, read from the Inductor that is installed.

Imports nothing of compile_remat but `version`.  `inductor_rules` reads the values at each call, so a user's own settings count:
``options={"realize_reads_threshold": 2}``, or values in ``torch._inductor.config``.  Torch's cache keys hold these options, and a
partitioner runs while they are in force.  ``tests/_torch/test_codegen_rules.py`` has a test for each rule that fails when Inductor
changes it.

Versions: before 2.13 all devices had the same threshold (``realize_acc_reads_threshold = 8``), and the list of heavy operators was
shorter (exp, sigmoid).

The module is here and not in `compile_remat.inductor` because `passes` and `cost_models` import it too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compile_remat._torch.version import torch_version

UNARY_OPS = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Operators of ``torch._inductor.virtualized.ops`` with one argument, each of which is tested for being heavy."""

SCATTERS = ("_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "index_put", "scatter_add", "scatter")
"""`InductorRules.scatters`: gradients of pooling, of an embedding, of ``gather``, of indexing, of ``sort`` and of a maximum."""

MULTIPROCESSORS, CAPABILITY = 132, 9
"""Multiprocessors and major compute capability that rules assume without a GPU: those of an H100 and an H200."""

WINDOW_READERS = (
    "_low_memory_max_pool_with_offsets",
    "max_pool2d_with_indices_backward",
    "avg_pool2d",
    "avg_pool3d",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_nearest2d_backward",
)
"""`InductorRules.window_readers`."""

SCATTER_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
"""Candidate dtypes for `InductorRules.unfused_scatter_dtypes`."""


def write_where_it_stands(node: torch.fx.Node) -> None:
    """Have Inductor write a value to memory at its node, and not only when a later node first needs the value in memory."""
    node.meta["inductor_realize_to_strides"] = True  # read by GraphLowering.run_node in 2.11 to 2.15


@dataclass(frozen=True)
class InductorRules:
    """Rules by which Inductor writes a value of a fused kernel to memory and lays tensors out, on one type of device.

    Attributes:
        max_reads: A value whose fused expression reads more buffers is materialised (``StorageBox.has_exceeded_max_reads`` in
            ``ir.py``; ``config.realize_acc_reads_threshold``).
        max_reads_if_reused: The same limit for a value with several readers (``StorageBox.should_realize_on_reuse``;
            ``config.realize_reads_threshold``).
        unrolled_below: A reduction over fewer elements becomes a pointwise kernel (``Reduction.create``;
            ``config.unroll_reductions_threshold``).
        unrolls_to_one: True if such a reduction with a single result becomes a pointwise kernel too.
        heavy_ops: Names of operators, ascending.  A value with several readers whose expression has one of these operators is
            materialised (``StorageBox.should_realize_on_reuse``).
        strided_readers: Operators whose inputs are materialised, as they need strides (``GraphLowering.run_node`` in ``graph.py``).
        window_readers: Operators that load an element of their first input several times: poolings, enlargements, their gradients.
            The input is materialised if its expression loads two buffers (``realize_hint`` in ``lowering.py`` and ``ir.py``).
        drawn_ops: Operators whose results are materialised for any reader (``inductor_random`` in ``lowering.py``).
        always_concatenates: True if every concatenation gets a buffer into which its inputs are written (``cat`` in
            ``lowering.py``).  If False, only a concatenation of buffers does, and a fused kernel computes the others.
        concatenates_shared: True if a concatenation that an unfused kernel reads gets such a buffer, too, when one of its inputs
            has other readers (``any_input_has_multi_consumers`` there).
        scatters: Operators that write into a copy of their first argument inside of a fused kernel (``index_put_impl_`` and
            ``scatter_reduce_`` in ``lowering.py``).
        unfused_scatter_dtypes: Dtypes for which these operators call ATen's kernel
            (``needs_fallback_due_to_atomic_add_limitations``).
        has_channels_last: True if convolutions read and write four-dimensional tensors in channels-last order
            (``GraphLowering.decide_layout_opt``; ``config.layout_optimization``).  On a GPU this depends on the graph's
            convolutions (``conv_layout.with_layout``).
        gradients_read_eager_strides: True if a convolution's gradient reads its operands in eager mode's strides
            (``make_fallback(aten.convolution_backward, constrain_to_fx_strides)`` in ``lowering.py``, before 2.13).  Inductor
            copies a concatenation in channels-last order for the gradient; the library copies one in eager mode's order.
        padded_above: A stride of more elements than this is rounded up (``Layout._pad_strides`` in ``ir.py``;
            ``config.comprehensive_padding`` and ``config.padding_stride_threshold``); None if no stride is.
        padding_bytes: The multiple, in bytes, to which such strides are rounded up (``config.padding_alignment_bytes``).
        draws_by_kernel: True if random numbers depend on the kernel that draws them, not on their seed and offset alone: then
            they cannot be recomputed (``TritonOverrides.rand`` in ``codegen/triton.py``: from 2.13 on, a pointwise kernel
            for CUDA draws four numbers at once, a reduction one).
        max_pooling_window: A pooling whose elements lie in more windows calls ATen's kernel (``max_pool2d_with_indices_backward``
            and ``avg_pool2d_backward`` in ``lowering.py``).
        split_below, unsplit_length: A reduction with fewer results than `split_below`, each of more elements than
            `unsplit_length`, runs in two kernels (``Reduction.num_splits``, ``reduction_split_factor`` in ``choices.py``).
        mixes_reductions: True if a sum over rows may join the kernel of a reduction along the same rows
            (``MixOrderReduction`` in ``scheduler.py``, from 2.10 on; ``config.triton.mix_order_reduction``).
        mask_traffic_factor: Time of a byte of a saved bool tensor, as a multiple of that of any other byte.  Inductor's C++ does
            not vectorise loads and stores of bool: a ResNet whose plan saved twelve masks instead of comparing saved activations
            again took 1.8 times as long as plain torch.compile (``python -m benchmarks.max_speed --model resnet``).
    """

    max_reads: int
    max_reads_if_reused: int
    heavy_ops: tuple[str, ...]
    always_concatenates: bool
    has_channels_last: bool
    mask_traffic_factor: int
    strided_readers: tuple[str, ...] = ("aten.as_strided.default", "aten.as_strided_scatter.default")
    drawn_ops: tuple[str, ...] = ("inductor_random",)
    concatenates_shared: bool = False
    padded_above: int | None = None
    padding_bytes: int = 128
    gradients_read_eager_strides: bool = False
    draws_by_kernel: bool = False
    max_pooling_window: int = 25
    scatters: tuple[str, ...] = ()
    unfused_scatter_dtypes: tuple[torch.dtype, ...] = ()
    unrolled_below: int = 8
    unrolls_to_one: bool = True
    window_readers: tuple[str, ...] = WINDOW_READERS
    split_below: int = 0
    unsplit_length: int = 0
    mixes_reductions: bool = False


RulesOf = Callable[[str], InductorRules]
"""Returns the rules for a type of device."""


def inductor_rules(device_type: str) -> InductorRules:
    """Returns the rules of the installed Inductor under its current configuration.

    Args:
        device_type: ``"cpu"``, for which Inductor emits C++; any other type gets the rules for Triton.  No device is needed.
    """
    from torch._inductor import config

    is_cpu = device_type == "cpu"
    multiprocessors, capability = (0, 0) if is_cpu else _gpu_figures()  # reading a GPU's figures takes memory of it
    return InductorRules(
        max_reads=_max_reads(is_cpu),
        max_reads_if_reused=int(config.realize_reads_threshold),
        heavy_ops=_heavy_ops("cpu" if is_cpu else "cuda"),
        always_concatenates=is_cpu,
        concatenates_shared=torch_version() >= (2, 13),
        has_channels_last=is_cpu and _has_onednn() and bool(config.layout_optimization),
        mask_traffic_factor=8 if is_cpu else 1,
        padded_above=int(config.padding_stride_threshold) if _has_padding(is_cpu) else None,
        padding_bytes=int(config.padding_alignment_bytes),
        gradients_read_eager_strides=_convolution_gradients_fall_back(),
        draws_by_kernel=device_type == "cuda"
        and _draws_four_at_once()
        and not getattr(config, "align_random_eager", False),
        scatters=() if torch.are_deterministic_algorithms_enabled() else _scatters(is_cpu),
        unrolled_below=int(config.unroll_reductions_threshold),
        unrolls_to_one=not is_cpu,
        unfused_scatter_dtypes=tuple(filter(_has_no_atomic_add, SCATTER_DTYPES)),
        split_below=2 * multiprocessors if config.split_reductions else 0,
        unsplit_length=524_288 if capability >= 10 else 8192,
        mixes_reductions=not is_cpu and bool(getattr(config.triton, "mix_order_reduction", False)),
    )


def _gpu_figures() -> tuple[int, int]:
    """Returns the multiprocessors and the major compute capability of the current GPU, or assumed ones without a GPU."""
    if not torch.cuda.is_available():
        return MULTIPROCESSORS, CAPABILITY
    properties = torch.cuda.get_device_properties()
    return int(properties.multi_processor_count), int(properties.major)


def _scatters(is_cpu: bool) -> tuple[str, ...]:
    """Returns `SCATTERS`, without the operator for which Inductor calls ATen on several threads (``use_scatter_fallback``)."""
    from torch._inductor import config
    from torch._inductor.utils import parallel_num_threads

    is_called = config.cpp.fallback_scatter_reduce_sum and (config.cpp.dynamic_threads or parallel_num_threads() != 1)
    return tuple(name for name in SCATTERS if not (is_cpu and is_called and name == "scatter_add"))


def _has_no_atomic_add(dtype: torch.dtype) -> bool:
    from torch._inductor.utils import needs_fallback_due_to_atomic_add_limitations

    return bool(needs_fallback_due_to_atomic_add_limitations(dtype))


def _convolution_gradients_fall_back() -> bool:
    """Returns whether Inductor has no lowering of its own for gradients of convolutions."""
    from torch._inductor.kernel import conv

    return not hasattr(conv, "convolution_backward_lowering")


def _draws_four_at_once() -> bool:
    from torch._inductor.codegen.triton import TritonOverrides

    return hasattr(TritonOverrides, "_can_use_4x_random")


def _has_padding(is_cpu: bool) -> bool:
    """Returns whether Inductor pads strides, as ``maybe_disable_comprehensive_padding`` in ``compile_fx.py`` decides."""
    from torch._inductor import config

    return bool(config.comprehensive_padding) and not (is_cpu and config.disable_padding_cpu)


def _max_reads(is_cpu: bool) -> int:
    """Returns ``realize_acc_reads_threshold``, or the device's default where it is None, as from 2.13 on unless the user set it."""
    from torch._inductor import config

    given: int | None = config.realize_acc_reads_threshold
    if given is None:
        given = getattr(config, "realize_cpu_acc_reads_threshold" if is_cpu else "_realize_acc_reads_threshold_default")
    assert given is not None
    return given


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()


@functools.cache
def _heavy_ops(device_type: str) -> tuple[str, ...]:
    """Returns the `UNARY_OPS` that Inductor materialises for two readers.  Its list is a local variable, so each is tried."""
    return tuple(name for name in UNARY_OPS if _is_heavy(name, torch.device(device_type)))


def _is_heavy(name: str, device: torch.device) -> bool:
    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    def inner_fn(index: object) -> Any:
        return getattr(ops, name)(ops.constant(0.0, torch.float32))

    value = ir.Pointwise(device=device, dtype=torch.float32, inner_fn=inner_fn, ranges=[1])
    return bool(ir.StorageBox(value).should_realize_on_reuse(2))
