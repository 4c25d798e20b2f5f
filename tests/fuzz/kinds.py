"""Meaning of an instruction's kind: a Python expression over its arguments ({0}, {1}..., {args}) and attributes ({a}...).

Expressions that could blow up are tamed (a divisor is 1 + x*x), so that a wrong gradient stands out from rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Cubed(torch.autograd.Function):
    """Saves its input and an intermediate value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return torch.tanh(square * x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, square = ctx.saved_tensors
        return gradient * (1 - torch.tanh(square * x) ** 2) * 3 * square


class StraightThrough(torch.autograd.Function):
    """Rounds, and lets the gradient pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "checkpoint": checkpoint,
    "Cubed": Cubed,
    "StraightThrough": StraightThrough,
}
"""Names that a program's source can use."""

UNARY = {
    "sin": "torch.sin({0})",
    "tanh": "torch.tanh({0})",
    "cos": "torch.cos({0})",
    "sigmoid": "torch.sigmoid({0})",
    "relu": "torch.relu({0})",
    "gelu": "F.gelu({0})",
    "silu": "F.silu({0})",
    "bell": "torch.exp(-{0} * {0})",
    "softplus": "F.softplus({0})",
    "log1p": "torch.log1p({0}.abs())",
    "sqrt": "torch.sqrt({0} * {0} + 0.5)",
    "square": "{0}.pow(2)",
    "reciprocal": "1 / (1 + {0} * {0})",
    "leaky_relu": "F.leaky_relu({0}, 0.1)",
    "elu": "F.elu({0})",
    "clamp": "{0}.clamp(-0.5, 0.8)",
    "erf": "torch.erf({0})",
    "negate": "-{0}",
    "clone": "{0}.clone()",
    "by_size": "{0} * ({0}.shape[-1] / ({0}.numel() + 1))",
    "cubed_function": "Cubed.apply({0})",
    "straight_through": "StraightThrough.apply({0}) * 0.5",
    "fft": "torch.fft.rfft({0}).abs()",
    "fft_product": "torch.fft.ifft(torch.fft.fft({0}) * torch.fft.fft(torch.sin({0})).conj()).real",
    "as_complex": "torch.view_as_real(torch.complex({0}, torch.cos({0})) ** 2).flatten(-2)",
}

IN_PLACE = {
    "relu_": "{0}.relu_()",
    "tanh_": "{0}.tanh_()",
    "sigmoid_": "{0}.sigmoid_()",
    "mul_number_": "{0}.mul_(0.8)",
    "add_number_": "{0}.add_(0.3)",
    "clamp_": "{0}.clamp_(-0.7, 0.9)",
    "leaky_relu_": "F.leaky_relu({0}, 0.2, inplace=True)",
    "silu_": "F.silu({0}, inplace=True)",
}

IN_PLACE_BINARY = {
    "add_": "{0}.add_({1})",
    "mul_": "{0}.mul_({1})",
    "sub_": "{0}.sub_({1}, alpha=0.5)",
    "copy_": "{0}.copy_({1})",
    "lerp_": "{0}.mul_(0.9).add_({1}, alpha=0.1)",
}

BINARY = {
    "add": "{0} + {1}",
    "mul": "{0} * {1}",
    "sub": "{0} - {1}",
    "div": "{0} / (1 + {1} * {1})",
    "maximum": "torch.maximum({0}, {1})",
    "where": "torch.where({0} > {1}, {0}.sin(), {1} * 0.5)",
    "masked_fill": "{0}.masked_fill({1} > 0.2, 0.1)",
    "addcmul": "torch.addcmul({0}, {0}.sin(), {1}, value=0.5)",
    "gate": "{0} * torch.sigmoid({1})",
    "hypot": "torch.sqrt({0} * {0} + {1} * {1} + 0.1)",
}

REDUCTIONS = {
    "sum": "{0}.sum({a}, keepdim={b}) * 0.3",
    "mean": "{0}.mean({a}, keepdim={b})",
    "amax": "{0}.amax({a}, keepdim={b})",
    "var": "{0}.var({a}, unbiased=False, keepdim={b})",
    "logsumexp": "{0}.logsumexp({a}, keepdim={b})",
    "norm": "({0} * {0} + 0.1).sum({a}, keepdim={b}).sqrt()",
    "max_values": "{0}.max({a}, keepdim={b}).values",
    "prod": "({0} * 0.5 + 1).prod({a}, keepdim={b})",
}

ALONG = {
    "softmax": "torch.softmax({0}, {a})",
    "log_softmax": "torch.log_softmax({0}, {a})",
    "cumsum": "{0}.cumsum({a}) * 0.5",
    "cumprod": "({0} * 0.3 + 1).cumprod({a})",
    "normalize": "F.normalize({0} + 0.1, dim={a})",
    "standardize": "({0} - {0}.mean({a}, keepdim=True)) / ({0}.var({a}, unbiased=False, keepdim=True) + 0.1).sqrt()",
    "flip": "{0}.flip({a})",
    "roll": "{0}.roll(1, {a})",
    "sorted": "{0}.sort({a}).values",
    "repeat_interleave": "{0}.repeat_interleave(2, {a})",
    "logcumsumexp": "torch.logcumsumexp({0}, {a})",
    "argmax_gather": "{0}.gather({a}, {0}.argmax({a}, keepdim=True))",
    "max_along": "{0}.max({a}, keepdim=True).values * {0}",
    "min_along": "{0}.min({a}).values",
    "median_along": "{0}.median({a}, keepdim=True).values + {0}",
    "kth_along": "{0}.kthvalue(1, {a}).values",
    "cummax_along": "{0}.cummax({a}).values",
    "sort_along": "{0}.sort(stable=True, dim={a}).values",
    "topk_along": "{0}.topk(({0}.shape[{a}] + 1) // 2, {a}).values",
    "argmin_gather": "{0}.gather({a}, {0}.argmin({a}, keepdim=True)) * {0}",
}

POOLING = {
    "adaptive_max_pool": "F.adaptive_max_pool2d({0}, ({0}.shape[-2] - 1, {0}.shape[-1] // 2))",
    "max_pool3d": "F.max_pool3d({0}.unsqueeze(0), (1, 2, 2)).squeeze(0)",
    "overlapping_max_pool": "F.max_pool2d({0}, 2, stride=1)",
    "max_unpool": "F.max_unpool2d(*F.max_pool2d({0}, 2, return_indices=True), 2, output_size={0}.shape[-2:])",
}
"""The backward reads indices into windows, or offsets."""

RANDOM_KINDS = {
    "dropout": "F.dropout({0}, 0.3)",
    "dropout_": "F.dropout({0} * 1.5, 0.5, inplace=True)",
    "alpha_dropout": "F.alpha_dropout({0}, 0.2)",
    "feature_dropout": "F.dropout1d({0}.unsqueeze(0), 0.4).squeeze(0)",
    "noise": "{0} + 0.1 * torch.randn_like({0})",
    "rand_scale": "{0} * torch.rand_like({0})",
    "bernoulli": "{0} * torch.bernoulli(torch.sigmoid({0}).detach())",
    # Except in eager mode, torch 2.13 merges two of these on one tensor; so no two get the same tensor.
    "rrelu": "F.rrelu({0} + 0.1 * torch.randn_like({0}), training=True)",
    "gumbel": "torch.softmax({0} - torch.log(-torch.log(torch.rand_like({0}) * 0.9 + 0.05)), -1)",
    "randint_rows": "{0}[torch.randint(0, {0}.shape[0], ({0}.shape[0] + 1,))]",
    "multinomial_rows": "{0}[torch.multinomial(torch.full(({0}.shape[0],), 0.5), {0}.shape[0] + 2, replacement=True)]",
    "normal": "{0} * (1 + torch.empty_like({0}).normal_(0, 0.2))",
    "uniform": "{0} + torch.empty_like({0}).uniform_(-0.2, 0.2)",
    "sdpa_dropout": "F.scaled_dot_product_attention({0}, {1}, {2}, dropout_p=0.3)",
}

SHAPED = {
    "linear": "F.linear({0}, {1})",
    "linear_bias": "F.linear({0}, {1}, {2})",
    "matmul": "{0} @ {1} * 0.5",
    "gram": "{0} @ {0}.transpose(-1, -2) * 0.5",
    "einsum_outer": "torch.einsum('...i,...j->...ij', {0}, {1})",
    "einsum_mix": "torch.einsum('...i,ij->...j', {0}, {1})",
    "bilinear": "torch.einsum('...i,ij,...j->...', {0}, {1}, {0})",
    "conv1d": "F.conv1d({0}, {1}, padding=1)",
    "conv2d": "F.conv2d({0}, {1}, {2}, padding=1)",
    "depthwise": "F.conv2d({0}, {1}, padding=1, groups={a})",
    "conv_transpose": "F.conv_transpose2d({0}, {1}, stride=2)",
    "avg_pool": "F.avg_pool2d({0}, 2, ceil_mode=True)",
    "max_pool": "F.max_pool2d({0}, 2, ceil_mode=True)",
    "adaptive_pool": "F.adaptive_avg_pool2d({0}, 2)",
    "upsample": "F.interpolate({0}, scale_factor=2, mode='nearest')",
    "bilinear_upsample": "F.interpolate({0}, scale_factor=2, mode='bilinear')",
    "layer_norm": "F.layer_norm({0}, ({0}.shape[-1],), {1}, {2})",
    "rms_norm": "F.rms_norm({0}, ({0}.shape[-1],), {1})",
    "group_norm": "F.group_norm({0}, {a}, {1}, {2})",
    "instance_norm": "F.instance_norm({0})",
    "batch_norm": "F.batch_norm({0}, {1}, {2}, {3}, {4}, training=True, momentum=0.2)",
    "batch_norm_eval": "F.batch_norm({0}, {1}, {2}.abs() + 0.1, {3}, {4}, training=False)",
    "batch_norm_stateless": "F.batch_norm({0}, None, None, {1}, {2}, training=True)",
    "sdpa": "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal={a})",
    "attention": "torch.softmax({0} @ {1}.transpose(-1, -2) * 0.4, -1) @ {2}",
    "masked_attention": (
        "torch.softmax(({0} @ {1}.transpose(-1, -2)).masked_fill(torch.ones({0}.shape[-2], {1}.shape[-2], "
        "dtype=torch.bool).triu(1), -1e4), -1) @ {2}"
    ),
    "embedding": "F.embedding({0}, {1})",
    "embedding_bag": "F.embedding_bag({0}, {1}, mode='mean')",
    "cross_entropy": "F.cross_entropy({0}, {1})",
    "loss_of_head": "F.cross_entropy(F.linear({0}, {1}).flatten(0, -2), {2}.flatten(), label_smoothing={a}, reduction={b!r}, "
    "ignore_index={c})",
    "z_loss_of_head": "torch.logsumexp({0} @ {1}, -1).square() * 0.1",
    "mlp": "F.linear(F.gelu(F.linear({0}, {1})), {2})",
    "gated_mlp": "F.linear(F.silu(F.linear({0}, {1})) * F.linear({0}, {2}), {3})",
    "index": "{0}[{1}]",
    "index_select": "{0}.index_select(0, {1})",
    "gather_rows": "{0}.gather(0, {1}.reshape(-1, *[1] * ({0}.dim() - 1)).expand(-1, *{0}.shape[1:]))",
    "index_add": "torch.zeros_like({0}).index_add(0, {1}, {0}[: {1}.shape[0]].expand({1}.shape[0], *{0}.shape[1:]))",
    "index_put": "{0}.index_put(({1},), {0}[{1}] * 0.5, accumulate=True)",
    "scatter_add": "torch.zeros_like({0}).scatter_add(0, {1}.reshape(-1, *[1] * ({0}.dim() - 1)).expand(-1, "
    "*{0}.shape[1:]), {0}[{1}])",
    "one_hot": "F.one_hot({0}, {a}).to({1}.dtype) * 0.5",
    "cat": "torch.cat(({args},), {a})",
    "stack": "torch.stack(({args},), {a})",
    "chunk": "{0}.chunk(2, {a})",
    "split": "{0}.split({0}.shape[{a}] - 1, {a})",
    "unbind": "{0}.unbind({a})",
    "topk": "{0}.topk({a}, -1)",
    "to": "{0}.to(torch.{a})",
    "to_dtype_of": "{0}.to({1}.dtype)",
    "detach": "{0}.detach()",
    "fold": "{0} + {1}.sum().tanh().to({0}.dtype)",
    "float_of": "{0}.to({1}.dtype) * 0.3",
    "read_then_add_": "{0} * {1}.sin() + {1}.add_(0.25).sum()",
    "average_": "{0} + {1}.mul_(0.9).add_({0}.detach().mean(), alpha=0.1)",
    "buffer_copy_": "{0}.sin() * ({1} + 0.5) + {1}.copy_({0}.detach().mean())",
    "set_row_": "{0}.select(0, 0).fill_(0.5).sum() + {0}",
    "set_slice_": "{0}.narrow({a}, 0, 1).mul_(0.5).sum() + {0}",
}

VIEWS = {
    "permute": "{0}.permute({a})",
    "transpose": "{0}.transpose({a}, {b})",
    "contiguous": "{0}.transpose(0, -1).contiguous()",
    "reshape": "{0}.reshape({a})",
    "flatten": "{0}.flatten({a})",
    "merge_sizes": "{0}.reshape({0}.shape[0] * {0}.shape[1], *{0}.shape[2:])",
    "unsqueeze": "{0}.unsqueeze({a})",
    "squeeze": "{0}.squeeze()",
    "narrow": "{0}.narrow({a}, {b}, {c})",
    "half": "{0}[: ({0}.shape[0] + 1) // 2]",
    "stride": "{0}[..., ::2]",
    "select": "{0}.select({a}, {b})",
    "expand": "{0}.unsqueeze(0).expand({a}, *{0}.shape)",
    "repeat": "{0}.repeat({a}, *[1] * ({0}.dim() - 1))",
    "tril": "{0}.tril()",
    "diagonal": "{0}.diagonal(0, -2, -1)",
    "unfold": "{0}.unfold(-1, 2, 1)",
    "pad": "F.pad({0}, (1, 1))",
    "view_as": "{0}.view({0}.shape)",
    "channels_last": "{0}.contiguous(memory_format=torch.channels_last)",
    "as_strided": "{0}.contiguous().as_strided(({0}.shape[0], 2), (1, 0))",
}

GROUPS = {
    "unary": UNARY,
    "in place": {**IN_PLACE, **IN_PLACE_BINARY},
    "binary": BINARY,
    "reduction": REDUCTIONS,
    "along a dimension": ALONG,
    "random": RANDOM_KINDS,
    "layer": {**SHAPED, **POOLING},
    "view": VIEWS,
}

TEMPLATES: dict[str, str] = {kind: text for group in GROUPS.values() for kind, text in group.items()}

RANDOM = frozenset(RANDOM_KINDS)
