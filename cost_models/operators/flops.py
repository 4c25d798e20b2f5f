"""Arithmetic of a node, in floating-point operations (a multiply-add is two).

Heavy operators use the formulas of ``torch.utils.flop_counter``, including formulas that a user registered for a custom
operator with ``register_flop_formula``. Three things differ from a run under ``FlopCounterMode``:

* formulas get hinted shapes, never tensors, so that no guard is added and nothing is allocated;
* CPU flash attention, matrix-vector products, ``linear`` and the grouped products of experts, which torch's table lacks,
  have their formulas in this module;
* the weight gradient of a grouped convolution is divided by the number of groups: torch's formula counts it as dense.

The counts ignore causal masks and sparsity. The weight of a pointwise operator is a rule of thumb for a vector unit that
evaluates a polynomial, not a count of instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from compile_remat._torch.sizes import hint_int, hint_shape

_META = torch.device("meta")

_WEIGHTS: Mapping[str, int] = {
    **dict.fromkeys(("div", "true_divide", "reciprocal", "sqrt", "rsqrt", "fmod", "remainder", "floor_divide"), 5),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logit"), 10),
    **dict.fromkeys(("sin", "cos", "tan", "sinh", "cosh", "tanh", "sigmoid", "asin", "acos", "atan"), 15),
    **dict.fromkeys(("silu", "silu_backward", "softplus", "softplus_backward", "elu", "celu", "selu"), 15),
    **dict.fromkeys(("erf", "erfc", "pow", "gelu", "gelu_backward", "mish", "mish_backward", "atan2", "logaddexp"), 20),
    **dict.fromkeys(("asinh", "acosh", "atanh", "xlogy", "erfinv", "ndtri", "log_sigmoid", "log_sigmoid_forward"), 20),
    **dict.fromkeys(("lgamma", "digamma", "polygamma", "igamma", "igammac", "zeta", "i0", "i1"), 50),
    **dict.fromkeys(("inductor_random", "inductor_randint"), 60),  # ten rounds of Philox for each group of elements
    **dict.fromkeys(("var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "argmax", "argmin"), 3),
    **dict.fromkeys(("logsumexp", "softmax", "_softmax", "_log_softmax", "log_softmax", "_safe_softmax"), 13),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "prepare_softmax_online"), 8),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), 12),
    **dict.fromkeys(("_softmax_backward_data", "addcmul", "lerp", "fma", "addcdiv"), 4),
    **dict.fromkeys(("_log_softmax_backward_data", "logcumsumexp"), 13),
}


def element_weight(packet: str) -> int:
    """Operations for each element of a pointwise or reduction operator, such as "aten.exp"; 1 if it is not listed."""
    return _WEIGHTS.get(packet.rpartition(".")[2], 1)


def pow_weight(node: fx.Node) -> int:
    """Operations for each element of ``x ** e``: small integers are multiplications, as in Inductor, and 0.5 is a root."""
    exponent = node.args[1] if len(node.args) > 1 else None
    if not isinstance(exponent, int | float):
        return _WEIGHTS["pow"]
    if abs(exponent) == 0.5:
        return _WEIGHTS["sqrt"]
    if abs(exponent) <= 32 and exponent == int(exponent):
        return max(1, int(abs(exponent)).bit_length())
    return _WEIGHTS["pow"]


class _ShapeOnly:
    """Stands in for a tensor in formulas that take tensors: shape and sizes, on ``meta`` so that no value is read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.device = _META
        self.ndim = len(shape)

    def size(self, dim: int | None = None) -> Any:
        """Sizes as plain ints."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Formula = Callable[..., Any]


def _mv_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(a)


def _addmv_flops(_bias: Sequence[int], a: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * prod(a)


def _linear_flops(_x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return 2 * prod(out_shape) * weight[-1]


def _matmul_flops(a: Sequence[int], _b: Sequence[int], *_: Any, out_shape: Sequence[int], **__: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """Each row is multiplied by the matrix of one group, so the number of groups counts only if both operands have groups."""
    return 2 * prod(a[-2:]) * b[-1] * (a[0] if len(a) == len(b) == 3 else 1)


def _registered(name: str) -> Formula:
    """The shape formula of torch's operator `name`, for another operator of the same arithmetic."""

    def formula(*args: Any, **kwargs: Any) -> Any:
        return _shape_formula(flop_counter.flop_registry[getattr(torch.ops.aten, name)])(*args, **kwargs)

    return formula


_OWN_FORMULAS: Mapping[str, Formula] = {
    "aten.mv": _mv_flops,
    "aten.dot": _mv_flops,
    "aten.vdot": _mv_flops,
    "aten.addmv": _addmv_flops,
    "aten.linear": _linear_flops,
    "aten.matmul": _matmul_flops,
    "aten._grouped_mm": _grouped_mm_flops,
    "aten._scaled_grouped_mm": _grouped_mm_flops,
    "aten._int_mm": _registered("mm"),
    "aten._addmm_activation": _registered("addmm"),
    "aten._scaled_dot_product_flash_attention_for_cpu": _registered("_scaled_dot_product_flash_attention"),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _registered(
        "_scaled_dot_product_flash_attention_backward"
    ),
    "aten._scaled_dot_product_fused_attention_overrideable": _registered("_scaled_dot_product_flash_attention"),
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _registered(
        "_scaled_dot_product_flash_attention_backward"
    ),
}


def _shape_formula(registered: Formula) -> Formula:
    """The formula under torch's shape wrapper (``functools.wraps`` keeps it), which spares a pytree walk."""
    return getattr(registered, "__wrapped__", registered)


def heavy_flops(node: fx.Node, packet: str) -> int | None:
    """Operations by the formula of this operator; None if there is no formula, or if it fails on these arguments."""
    registered = flop_counter.flop_registry.get(getattr(node.target, "overloadpacket", node.target))
    own = _OWN_FORMULAS.get(packet)
    if registered is None and own is None:
        return None
    try:
        if packet == "aten.convolution_backward" and registered is not None:
            return _convolution_backward(node, _shape_formula(registered))
        if registered is None or hasattr(registered, "__wrapped__"):
            formula = own if registered is None else _shape_formula(registered)
            assert formula is not None
            return _as_count(formula(*_shapes(node.args), **_kw_shapes(node), out_shape=_shapes(node.meta.get("val"))))
        args = _shapes(node.args, wrap=True)
        kwargs = {name: _shapes(value, wrap=True) for name, value in node.kwargs.items()}
        return _as_count(registered(*args, **kwargs, out_val=_shapes(node.meta.get("val"), wrap=True)))
    except Exception:  # a user's formula may fail on these shapes: the caller prices by bytes
        return None


def _as_count(flops: Any) -> int | None:
    count = hint_int(flops) if isinstance(flops, int | torch.SymInt) else int(flops)
    return count if count >= 0 else None


def _kw_shapes(node: fx.Node) -> dict[str, Any]:
    return {name: _shapes(value) for name, value in node.kwargs.items()}


def _shapes(value: Any, wrap: bool = False) -> Any:
    """`value` with each node and tensor replaced by its hinted shape (if `wrap`, by a `_ShapeOnly`), and sizes by ints."""
    if isinstance(value, fx.Node):
        return _shapes(value.meta.get("val"), wrap)
    if isinstance(value, torch.Tensor):
        return _ShapeOnly(hint_shape(value)) if wrap else hint_shape(value)
    if isinstance(value, list | tuple):
        return [_shapes(v, wrap) for v in value]
    return hint_int(value) if isinstance(value, torch.SymInt) else value


def _convolution_backward(node: fx.Node, formula: Formula) -> int:
    """Operations of the input gradient, plus those of the weight gradient divided by the number of groups."""
    *shapes, groups, mask = _shapes(node.args)
    out_shape = _shapes(node.meta["val"])
    flops = int(formula(*shapes, groups, [True, False, False], out_shape=out_shape)) if mask[0] else 0
    if mask[1]:
        flops += int(formula(*shapes, groups, [False, True, False], out_shape=out_shape)) // groups
    return flops
