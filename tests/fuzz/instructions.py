"""Draws instructions: arithmetic, views, indices, casts, writes, random numbers.

Each function appends one instruction, or `unary` if no value fits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fuzz.builder import Builder, pointer, void
from tests.fuzz.kinds import ALONG, BINARY, IN_PLACE, IN_PLACE_BINARY, RANDOM_KINDS, REDUCTIONS, UNARY, VIEWS


def unary(b: Builder) -> None:
    kind = b.choose(list(UNARY))
    if kind in ("fft", "fft_product", "as_complex"):
        x = b.pick(lambda t: t.dim() > 0 and t.dtype in (torch.float32, torch.float64) and t.numel() <= b.sizes.largest)
    elif kind == "by_size":
        x = b.pick(lambda t: t.dim() > 0)
    else:
        x = b.pick()
    b.emit(*((kind, [x]) if x else ("sin", [b.pick()])))


def in_place(b: Builder) -> None:
    x = b.changeable()
    if x is None:
        return unary(b)
    if b.chance(2):
        b.emit(b.choose(list(IN_PLACE)), [x])
        return None
    if b.chance(3) and b[x].dim() > 0:
        if b.chance(2):
            b.emit("set_row_", [x])
        else:
            b.emit("set_slice_", [x], [b.choose(range(b[x].dim()))])
        return None
    # An input that gets a gradient becomes an output, and AOTAutograd then asks for more gradients than eager mode.
    given = b.is_given(x)
    other = b.pick(lambda t: _expands_to(t, b[x]) and pointer(t) != pointer(b[x]) and not (given and t.requires_grad))
    return unary(b) if other is None else void(b.emit(b.choose(list(IN_PLACE_BINARY)), [x, other]))


def binary(b: Builder) -> None:
    x = b.pick()
    assert x is not None
    other = b.pick(lambda t: _broadcast_numel(t, b[x]) <= b.sizes.largest)
    b.emit(b.choose(list(BINARY)), [x, other or x])


def reduction(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if x is None:
        return unary(b)
    dim = b.choose(range(-1, b[x].dim() - 1))
    return void(b.emit(b.choose(list(REDUCTIONS)), [x], [dim, b.chance(2)]))


def along(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and 0 < t.numel() <= b.sizes.largest)
    if x is None:
        return unary(b)
    return void(b.emit(b.choose(list(ALONG)), [x], [b.choose(range(-1, b[x].dim() - 1))]))


def shapes(b: Builder) -> None:
    """Views and their like."""
    kind = b.choose(list(VIEWS))
    least = {
        "channels_last": 4,
        "merge_sizes": 2,
        "tril": 2,
        "diagonal": 2,
        "unsqueeze": 0,
        "squeeze": 0,
        "expand": 0,
        "view_as": 0,
    }.get(kind, 1)
    grows = kind in ("expand", "repeat", "pad", "unfold")
    x = b.pick(
        lambda t: (
            least <= t.dim() <= 4 - (kind in ("expand", "unsqueeze", "unfold"))
            and 0 < t.numel() <= (b.sizes.largest // 2 if grows else 10**6)
            and (kind != "unfold" or t.shape[-1] > 1)
        )
    )
    if x is None:
        return unary(b)
    shape, last = b[x].shape, max(0, b[x].dim() - 1)
    attrs: list[Any] = []
    if kind == "permute":
        attrs = [b.choose((tuple(reversed(range(len(shape)))), (*range(1, len(shape)), 0)))]
    elif kind == "transpose":
        attrs = [b.choose(range(-1, last)), 0]
    elif kind == "reshape":
        total = b[x].numel()
        attrs = [
            b.choose([(-1,), *((k, total // k) for k in (2, 3, 4) if total % k == 0), (1, 2, -1)[: 3 - total % 2]])
        ]
        attrs = [(-1,)] if total % 2 and attrs[0][:2] == (1, 2) else attrs
    elif kind in ("flatten", "unsqueeze"):
        attrs = [b.choose(range(len(shape)) if shape else [0])]
    elif kind in ("narrow", "select"):
        dim = b.choose(range(-1, last))
        start = b.choose(range(shape[dim]))
        attrs = [dim, start, b.choose(range(1, shape[dim] - start + 1))] if kind == "narrow" else [dim, start]
    elif kind in ("expand", "repeat"):
        attrs = [2]
    return void(b.emit(kind, [x], attrs))


def joined(b: Builder) -> None:
    x = b.pick(lambda t: t.numel() <= b.sizes.largest)
    if x is None:
        return unary(b)
    others = [b.pick(lambda t: t.shape == b[x].shape) or x for _ in range(b.choose((1, 2)))]
    if b[x].dim() > 0 and not b.chance(3):
        return void(b.emit("cat", [x, *others], [b.choose(range(-1, b[x].dim() - 1))]))
    return void(b.emit("stack", [x, *others], [0])) if b[x].dim() < 4 else unary(b)


def parts(b: Builder) -> None:
    kind = b.choose(("chunk", "split", "unbind", "topk"))
    x = b.pick(lambda t: t.dim() > 0 and 2 <= t.shape[-1] <= (6 if kind == "unbind" else 64))
    if x is None:
        return unary(b)
    size = b[x].shape[-1]
    if kind == "topk":
        k = b.choose(range(1, size + 1))
        return void(b.emit(kind, [x], [k], outs=2))
    return void(b.emit(kind, [x], [-1], outs=size if kind == "unbind" else 2))


def indexing(b: Builder) -> None:
    if b.chance(3):
        x = b.pick()
        assert x is not None
        rows, width = 5, b.choose(b.sizes.widths[:3])
        ids = b.input(b.sizes.rows, "int64", rows)
        kind = b.choose(("embedding", "embedding_bag", "one_hot"))
        if kind == "one_hot":
            return void(b.emit(kind, [ids, x], [rows]))
        return void(b.emit(kind, [ids, b.leaf("parameter", (rows, width))]))
    x = b.pick(lambda t: 1 <= t.dim() <= 3 and 0 < t.numel() <= b.sizes.largest)
    if x is None:
        return unary(b)
    rows = b[x].shape[0]
    if b[x].dim() == 2 and b.chance(4):
        return void(b.emit("cross_entropy", [x, b.input((rows,), "int64", b[x].shape[1])]))
    ids = b.input((b.choose((rows, 1)),), "int64", rows)
    kinds = ("index", "index_select", "gather_rows", "index_add", "index_put", "scatter_add")
    return void(b.emit(b.choose(kinds), [x, ids]))


def casting(b: Builder) -> None:
    x = b.pick()
    integers = b.pick(floating=False)
    assert x is not None
    if integers and b.chance(2):
        return void(b.emit("float_of", [integers, x]))
    other = b.pick(lambda t: t.dtype != b[x].dtype)
    if other and not b.chance(3):
        return void(b.emit("to_dtype_of", [x, other]))
    return void(b.emit("to", [x], [b.choose(("float32", "float64", "bfloat16"))]))


def random_numbers(b: Builder) -> None:
    kind = b.choose([k for k in RANDOM_KINDS if k != "sdpa_dropout"])
    least = {"feature_dropout": 2, "randint_rows": 1, "multinomial_rows": 1, "gumbel": 1}.get(kind, 0)
    x = b.pick(
        lambda t: least <= t.dim() <= (2 if kind == "feature_dropout" else 4) and 0 < t.numel() <= b.sizes.largest
    )
    b.emit(*((kind, [x]) if x else ("dropout", [b.pick()])))


def buffers(b: Builder) -> None:
    x = b.pick()
    assert x is not None
    buffer = b.leaf("buffer", b.choose(((), (1,))), str(b[x].dtype).removeprefix("torch."))
    if {"checkpoint", "no_grad"} & set(b.regions) or buffer in b.checkpointed:
        return void(b.emit("gate", [x, buffer]))
    return void(b.emit(b.choose(("read_then_add_", "average_", "buffer_copy_")), [x, buffer]))


def detached(b: Builder) -> None:
    b.emit("detach", [b.pick()])


def _expands_to(small: torch.Tensor, large: torch.Tensor) -> bool:
    return small.dim() <= large.dim() and _broadcast_numel(small, large) == large.numel() and large.numel() > 0


def _broadcast_numel(a: torch.Tensor, b: torch.Tensor) -> int:
    pairs = list(zip(reversed(a.shape), reversed(b.shape), strict=False))
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        return 10**9
    return math.prod(torch.broadcast_shapes(a.shape, b.shape))
