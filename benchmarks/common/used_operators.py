"""The operators that training uses most, forward and backward, each with tensors of ordinary sizes.

Attention and convolution, normalisation, losses, pooling, interpolation, indexing, sorting, transforms, linear algebra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = torch.bfloat16


@dataclass(frozen=True)
class UsedOperator:
    """An operator with its arguments; `what` tells it from the others of its name."""

    target: Any
    args: Sequence[Any]
    what: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name, overload and the note on the tensors."""
        return " ".join(filter(None, (str(self.target).removesuffix(".default"), self.what)))


def _f(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape, dtype=torch.float32).to(dtype)


def _i(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def used_operators() -> list[UsedOperator]:
    """All of them, with the tensors made anew."""
    return [
        *_products(),
        *_convolutions(),
        *_norms_and_losses(),
        *_pooling(),
        *_indexing(),
        *_sorting(),
        *_linalg(),
        *_fft(),
    ]


def _products() -> list[UsedOperator]:
    x, w, batch = _f(2048, 512), _f(512, 512), _f(16, 256, 128)
    heads, small = _f(4, 8, 256, 64), [0.0, False]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    return [
        UsedOperator(aten.mm.default, (x, w)),
        UsedOperator(aten.mm.default, (x.to(HALF), w.to(HALF)), "bfloat16"),
        UsedOperator(aten.mm.default, (_f(2048, 512, 2)[..., 0], w), "strided"),
        UsedOperator(aten.addmm.default, (_f(512), x, w)),
        UsedOperator(aten.addmm.default, (_f(512).to(HALF), x.to(HALF), w.to(HALF)), "bfloat16"),
        UsedOperator(aten.bmm.default, (batch, batch.transpose(1, 2))),
        UsedOperator(aten.bmm.default, (batch.to(HALF), batch.transpose(1, 2).to(HALF)), "bfloat16"),
        UsedOperator(aten._scaled_dot_product_flash_attention_for_cpu.default, (heads, heads, heads)),
        UsedOperator(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            (heads, heads, heads, heads, out, lse, *small),
        ),
    ]


def _convolutions() -> list[UsedOperator]:
    """Convolutions in the layout that Inductor gives them."""
    x, how = _f(8, 32, 64, 64), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    last, w = (t.to(memory_format=torch.channels_last) for t in (x, _f(32, 32, 3, 3)))
    return [
        UsedOperator(aten.convolution.default, (last, w, None, *how)),
        UsedOperator(aten.convolution_backward.default, (last, last, w, [0], *how, [True, True, False])),
        UsedOperator(aten.im2col.default, (x, [3, 3], [1, 1], [1, 1], [1, 1])),
        UsedOperator(aten.col2im.default, (_f(8, 288, 4096), [64, 64], [3, 3], [1, 1], [1, 1], [1, 1])),
    ]


def _norms_and_losses() -> list[UsedOperator]:
    x, image, one = _f(2048, 1024), _f(8, 32, 64, 64), _f(32)
    rows, columns, classes = _f(2048, 1), _f(1024), _i(2048)
    return [
        UsedOperator(aten.native_layer_norm.default, (x, [1024], columns, columns, 1e-5)),
        UsedOperator(
            aten.native_layer_norm_backward.default, (x, x, [1024], rows, rows, columns, columns, [True, True, True])
        ),
        UsedOperator(aten.native_group_norm.default, (image, one, one, 8, 32, 4096, 8, 1e-5)),
        UsedOperator(
            aten.native_group_norm_backward.default,
            (image, image, _f(8, 8), _f(8, 8), one, 8, 32, 4096, 8, [True, True, True]),
        ),
        UsedOperator(aten.native_batch_norm.default, (image, one, one, one, one, True, 0.1, 1e-5)),
        UsedOperator(
            aten.native_batch_norm_backward.default, (image, image, *[one] * 5, True, 1e-5, [True, True, True])
        ),
        UsedOperator(aten._fused_rms_norm.default, (x, [1024], columns, 1e-6)),
        UsedOperator(aten._softmax.default, (x, 1, False)),
        UsedOperator(aten._softmax_backward_data.default, (x, x, 1, torch.float32)),
        UsedOperator(aten._log_softmax.default, (x, 1, False)),
        UsedOperator(aten.logsumexp.default, (x, [1])),
        UsedOperator(aten.nll_loss_forward.default, (x, classes, None, 1, -100)),
        UsedOperator(aten.nll_loss_backward.default, (_f(), x, classes, None, 1, -100, _f())),
        UsedOperator(aten.nll_loss2d_forward.default, (image, _i(8, 64, 64), None, 1, -100)),
        UsedOperator(aten.binary_cross_entropy.default, (x, x)),
        UsedOperator(aten.soft_margin_loss_backward.default, (_f(), x, x, 1)),
        UsedOperator(aten._cdist_forward.default, (_f(16, 256, 64), _f(16, 256, 64), 2.0, None)),
    ]


def _pooling() -> list[UsedOperator]:
    x, half, large = _f(8, 32, 64, 64), _f(8, 32, 32, 32), _f(8, 32, 128, 128)
    sizes = [128, 128], [8, 32, 64, 64]
    return [
        UsedOperator(aten.max_pool2d_with_indices.default, (x, [2, 2])),
        UsedOperator(
            aten.max_pool2d_with_indices_backward.default,
            (half, x, [2, 2], [2, 2], [0, 0], [1, 1], False, _i(8, 32, 32, 32)),
        ),
        UsedOperator(aten.avg_pool2d.default, (x, [2, 2])),
        UsedOperator(aten.avg_pool2d_backward.default, (half, x, [2, 2], [2, 2], [0, 0], False, True, None)),
        UsedOperator(aten._adaptive_avg_pool2d.default, (x, [7, 7])),
        UsedOperator(aten._adaptive_avg_pool2d_backward.default, (_f(8, 32, 7, 7), x)),
        UsedOperator(
            aten.max_pool3d_with_indices_backward.default,
            (_f(2, 8, 8, 16, 16), _f(2, 8, 16, 32, 32), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, _i(2, 8, 8, 16, 16)),
        ),
        UsedOperator(aten.upsample_nearest2d_backward.default, (large, *sizes)),
        UsedOperator(aten.upsample_bilinear2d.default, (x, [128, 128], True)),
        UsedOperator(aten.upsample_bilinear2d_backward.default, (large, *sizes, True)),
        UsedOperator(aten.upsample_bicubic2d_backward.default, (large, *sizes, True)),
        UsedOperator(aten.grid_sampler_2d_backward.default, (x, x, _f(8, 64, 64, 2), 0, 0, False, [True, True])),
        UsedOperator(aten.reflection_pad2d_backward.default, (_f(8, 32, 68, 68), x, [2] * 4)),
    ]


def _indexing() -> list[UsedOperator]:
    x, places = _f(2048, 512), _i(2048, 512)
    return [
        UsedOperator(aten.embedding.default, (_f(8192, 512), _i(2048))),
        UsedOperator(aten.embedding_dense_backward.default, (x, _i(2048), 8192, -1, False)),
        UsedOperator(aten._embedding_bag.default, (_f(8192, 64), _i(4096), _i(512))),
        UsedOperator(aten.index_put.default, (_f(8192, 512), [_i(2048)], x, True)),
        UsedOperator(aten.index_put.default, (_f(8192, 512).to(HALF), [_i(2048)], x.to(HALF), True), "bfloat16"),
        UsedOperator(aten.index_add.default, (x, 0, _i(2048), x)),
        UsedOperator(aten.gather.default, (x, 1, places)),
        UsedOperator(aten.scatter_add.default, (x, 1, places, x)),
        UsedOperator(aten.scatter_reduce.two, (x, 1, places, x, "mean"), "mean"),
        UsedOperator(aten.masked_scatter.default, (x, x > 0.5, x)),
    ]


def _sorting() -> list[UsedOperator]:
    x = _f(2048, 512)
    return [
        UsedOperator(aten.sort.default, (x,)),
        UsedOperator(aten.sort.default, (x.flatten(),), "of one dimension"),
        UsedOperator(aten.topk.default, (x, 16)),
        UsedOperator(aten.kthvalue.default, (x, 5)),
        UsedOperator(aten.cumsum.default, (x, 1)),
        UsedOperator(aten.multinomial.default, (x, 4)),
    ]


def _linalg() -> list[UsedOperator]:
    square = _f(16, 128, 128) + 128 * torch.eye(128)
    return [
        UsedOperator(aten.linalg_cholesky_ex.default, (square @ square.mT,)),
        UsedOperator(aten.linalg_inv_ex.default, (square,)),
        UsedOperator(aten._linalg_solve_ex.default, (square, square)),
        UsedOperator(aten.linalg_qr.default, (square,)),
        UsedOperator(aten._linalg_eigh.default, (square + square.mT,)),
        UsedOperator(aten._linalg_svd.default, (square,)),
        UsedOperator(aten.linalg_matrix_exp.default, (square / 128,)),
    ]


def _fft() -> list[UsedOperator]:
    x, half = _f(16, 128, 128), _f(16, 128, 65).to(torch.complex64)
    return [
        UsedOperator(aten._fft_r2c.default, (x, [2], 0, True)),
        UsedOperator(aten._fft_c2r.default, (half, [2], 2, 128)),
        UsedOperator(aten._fft_c2r.default, (half, [1, 2], 2, 128), "of two dimensions"),
        UsedOperator(aten._fft_c2c.default, (x.to(torch.complex64), [1, 2], 0, True)),
        UsedOperator(aten.mul.Tensor, (half, half), "complex"),
        UsedOperator(aten.abs.default, (half,), "complex"),
    ]
