"""Kinds of operators, by the way in which Inductor lowers them.

The kind tells the planner what to assume: a VIEW costs nothing, POINTWISE operators fuse into their readers and live in
registers, a REDUCTION fuses but its result is a buffer, and the heavy kinds and OTHER are kernels of their own whose
inputs and outputs are in memory. An operator that is not listed is OTHER, which is safe: it overestimates memory and
launches.

Facts that depend on the operator alone are looked up once for each target and cached.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import torch


class OpKind(StrEnum):
    """Kind of work that a node does on the device."""

    INPUT = "input"  # placeholder, get_attr
    CONSTANT = "constant"  # made without reading any tensor; Inductor inlines it into its readers
    VIEW = "view"  # aliases its input, no kernel runs
    ITEM = "item"  # one element of a multi-output node
    POINTWISE = "pointwise"  # Inductor's Pointwise: fuses, lives in registers
    REDUCTION = "reduction"  # Inductor's Reduction and Scan
    MATMUL = "matmul"
    CONV = "conv"
    ATTENTION = "attention"
    OTHER = "other"  # every remaining kernel: sort, scatter, collectives, custom and higher-order operators
    SYMBOL = "symbol"  # the value is a size or another Python number, no tensor


RUNS_NO_KERNEL = frozenset({OpKind.INPUT, OpKind.CONSTANT, OpKind.VIEW, OpKind.ITEM, OpKind.SYMBOL})
"""Kinds that cost no time."""

FUSED_KINDS = frozenset({OpKind.CONSTANT, OpKind.POINTWISE, OpKind.REDUCTION})
"""Kinds for which Inductor generates code, except for complex numbers."""

HEAVY_KINDS = frozenset({OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION})
"""Kinds whose time is mostly arithmetic, at the rate of matrix units if the device has them."""


def _aten(names: str) -> set[str]:
    return {f"aten.{name}" for name in names.split()}


def _prims(names: str) -> set[str]:
    return {f"prims.{name}" for name in names.split()}


_CONSTANT = _aten("""
        full full_like zeros zeros_like ones ones_like empty empty_like empty_strided empty_permuted arange
        linspace new_zeros new_ones new_full new_empty new_empty_strided scalar_tensor eye tril_indices
        triu_indices
    """) | _prims("iota scalar_tensor full empty_strided empty_permuted")
_VIEW = _aten("_unsafe_view _reshape_alias lift_fresh unsafe_split unsafe_split_with_sizes unsafe_chunk") | _prims("""
        split_dim collapse_view view_of broadcast_in_dim transpose squeeze slice as_strided view_element_type conj
    """)
_MATMUL = _aten("""
    mm addmm bmm baddbmm addbmm linear matmul mv addmv dot vdot _scaled_mm _scaled_mm_v2 _int_mm _grouped_mm
    _scaled_grouped_mm _addmm_activation _weight_int8pack_mm _weight_int4pack_mm _sparse_semi_structured_mm
""")
_CONV = _aten("""
    convolution _convolution convolution_backward convolution_overrideable convolution_backward_overrideable
    cudnn_convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
""")
_ATTENTION = ("scaled_dot_product_", "flash_attention", "efficient_attention", "flex_attention", "varlen_attn")
# Moved, not computed: no arithmetic, and Inductor still makes a Pointwise of it.
MOVES = _aten("""
        clone copy copy_ _to_copy contiguous lift lift_fresh_copy fill fill_ cat stack constant_pad_nd flip repeat
        roll slice_scatter select_scatter diagonal_scatter as_strided_scatter select_backward slice_backward tril
        triu where masked_fill expand_copy index _unsafe_index _unsafe_masked_index index_select gather embedding
        take take_along_dim pixel_shuffle pixel_unshuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d reflection_pad1d
        reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d diagonal_copy
        as_strided_copy squeeze_copy block_diag
    """) | _prims("convert_element_type rev device_put clone copy_strided inductor_force_stride_order")
GATHERS = _aten("""
    index _unsafe_index _unsafe_masked_index index_select gather embedding take take_along_dim
""")
"""Pointwise operators that read no more elements of their first tensor than they write."""
_POINTWISE = (
    MOVES
    | _aten("""
        gelu gelu_backward silu silu_backward mish mish_backward elu elu_backward celu selu leaky_relu hardtanh
        hardswish leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid hardsigmoid_backward
        threshold glu prelu threshold_backward softplus softplus_backward sigmoid_backward tanh_backward logit
        logit_backward log_sigmoid log_sigmoid_forward log_sigmoid_backward glu_backward clamp clip lerp addcmul
        addcdiv nan_to_num bucketize addr searchsorted sgn isnan isinf isfinite logaddexp rsub floor_divide xlogy
        native_dropout_backward polar complex avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward
        avg_pool3d_backward max_pool2d_with_indices frexp max_pool2d_with_indices_backward max_pool3d_with_indices
        _adaptive_avg_pool2d fractional_max_pool2d upsample_bilinear2d upsample_linear1d upsample_trilinear3d
        upsample_bicubic2d upsample_nearest2d_backward __and__ __or__ __xor__ __lshift__ __rshift__ isclose
        smooth_l1_loss huber_loss mse_loss abs_
    """)
    | _prims("""
        inductor_random inductor_randint inductor_lookup_seed _low_memory_max_pool_with_offsets fma add sub mul
        div _low_memory_max_pool_offsets_to_indices exp exp2 expm1 log log10 log1p log2 sin cos tan sinh cosh tanh
        erf erfc asin acos atan atan2 asinh acosh atanh sqrt rsqrt neg eq ne lt le gt ge ceil floor round where
        pow fmod remainder bitwise_and bitwise_or bitwise_xor lgamma ndtri zeta bessel_j0 bessel_j1 frexp minimum
    """)
    | {"compile_remat.unpack_bits"}
)
_REDUCTION = (
    _aten("""
        sum nansum mean amax amin aminmax var var_mean std std_mean prod any all argmax argmin logsumexp norm
        linalg_vector_norm count_nonzero cumsum cumprod cummax cummin logcumsumexp softmax log_softmax _softmax
        trace _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax nll_loss_forward
        nll_loss_backward native_layer_norm native_layer_norm_backward native_group_norm
        native_group_norm_backward
    """)
    | _prims("sum var xor_sum prod amax amin argmax argmin prepare_softmax_online")
    | {"compile_remat.pack_bits"}
)
# Tagged pointwise by torch, but kernels of their own in Inductor (lowering.py, make_fallback).
_FALLBACK = _aten("""
        angle digamma gcd igamma igammac polygamma special_zeta special_log_ndtr special_ndtri special_i0e
        special_i1e special_airy_ai special_spherical_bessel_j0 special_modified_bessel_k0
        special_modified_bessel_k1
    """) | _prims("digamma igamma igammac")
_SYMBOL = _aten("""
    sym_size sym_stride sym_numel sym_storage_offset _local_scalar_dense _assert_scalar sym_constrain_range
    _assert_tensor_metadata sym_constrain_range_for_size
""")
MAYBE_VIEW = _aten("reshape contiguous to flatten expand_as view_as")
"""Operators that return a view for some input strides and a copy for others."""

DROPOUT_POSITION = {
    "aten._scaled_dot_product_flash_attention": 3,
    "aten._scaled_dot_product_flash_attention_for_cpu": 3,
    "aten._scaled_dot_product_fused_attention_overrideable": 4,
    "aten._scaled_dot_product_efficient_attention": 5,
    "aten._scaled_dot_product_cudnn_attention": 5,
}
"""Position of the argument ``dropout_p``: torch tags all of these as random, but without dropout they are not."""

BYTES_SUFFICE = (
    _aten("""
        index_put index_put_ _unsafe_index_put _index_put_impl_ _unsafe_masked_index_put_accumulate scatter
        scatter_add scatter_ scatter_add_ scatter_reduce index_add index_copy index_fill embedding_dense_backward
        masked_scatter rand rand_like randn randn_like randint bernoulli native_dropout native_batch_norm
        native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward _weight_norm_interface
    """)
    | _prims("inductor_seeds inductor_seed")
    | {"compile_remat.gradient_ready"}
)
"""OTHER operators whose time is that of the bytes they move, so a price by bytes is not marked as estimated."""


@dataclass(frozen=True)
class TargetFacts:
    """Facts about an operator that hold for every node with this target."""

    text: str  # "aten.mm.default"
    packet: str  # "aten.mm"
    kind: OpKind
    is_random: bool  # by its tag; attention without dropout is not, see DROPOUT_POSITION


@cache
def target_facts(target: Any) -> TargetFacts:
    """Facts about a ``call_function`` target: an OpOverload, a HigherOrderOperator or a Python function."""
    text, packet = _names(target)
    tags = getattr(target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags or "rng_state" in packet
    return TargetFacts(text, packet, _kind_of_target(target, packet, tags), is_random)


def _names(target: Any) -> tuple[str, str]:
    packet = getattr(target, "overloadpacket", None)
    if packet is not None:
        return str(target), str(packet)
    if hasattr(target, "namespace"):  # HigherOrderOperator
        return str(target), str(target)
    module = getattr(target, "__module__", None) or ""
    name = f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"
    return name, name


def _kind_of_target(target: Any, packet: str, tags: Any) -> OpKind:
    if target is operator.getitem:
        return OpKind.ITEM
    if any(part in packet for part in _ATTENTION):
        return OpKind.ATTENTION
    for kind, names in _LISTED:
        if packet in names:
            return kind
    # The overload of `max` and `min` decides between reduction and comparison; torch does not tag all overloads.
    if packet in ("aten.max", "aten.min"):
        return OpKind.POINTWISE if str(target).endswith(".other") else OpKind.REDUCTION
    if getattr(target, "is_view", False):
        return OpKind.VIEW
    if torch.Tag.pointwise in tags:
        return OpKind.POINTWISE
    return OpKind.OTHER


_LISTED: tuple[tuple[OpKind, set[str]], ...] = (
    (OpKind.SYMBOL, _SYMBOL),
    (OpKind.CONSTANT, _CONSTANT),
    (OpKind.VIEW, _VIEW),
    (OpKind.MATMUL, _MATMUL),
    (OpKind.CONV, _CONV),
    (OpKind.REDUCTION, _REDUCTION),
    (OpKind.OTHER, _FALLBACK),
    (OpKind.POINTWISE, _POINTWISE),
)
