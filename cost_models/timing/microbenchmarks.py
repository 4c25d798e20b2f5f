"""The kernels that calibration runs, with their arguments.

Every case names the figures that are fitted to it (`group`). Its counts come from `describe` on a trace of the timed
function, so that the fit uses the same counts as plans do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from compile_remat.cost_models.operators.kinds import RUNS_NO_KERNEL
from compile_remat.cost_models.operators.ops import Op, describe

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One kernel, or a few consecutive kernels.

    Attributes:
        name: Name of the case in the calibration's table.
        group: The figures that are fitted to the case.
        function: The function that is timed.
        arguments: Draws the arguments of the function.
        compiled: True if Inductor compiles the function, into fused kernels where possible.
        is_cold: True if the case runs once in each round, after all others, when its arguments have left the cache. If False,
            it runs several times, on arguments that the cache holds.
    """

    name: str
    group: str
    function: Function
    arguments: Callable[[], tuple[Tensor, ...]]
    compiled: bool = False
    is_cold: bool = False

    def ops(self) -> list[Op]:
        """Counts of all kernels of the case, from a trace on fake tensors."""
        traced = make_fx(self.function, tracing_mode="fake")(*self.arguments())
        ops = [describe(node) for node in traced.graph.nodes if node.op == "call_function"]
        return [op for op in ops if op.kind not in RUNS_NO_KERNEL]


def cases(
    device: torch.device,
    dtype: torch.dtype,
    others: Sequence[torch.dtype] = (),
    *,
    is_tf32: bool = False,
    is_toy: bool = False,
) -> list[Case]:
    """All cases of a calibration.

    Args:
        dtype: Dtype of the products, attention and convolutions: the one that training on such a device uses.
        others: Other dtypes in which the rate of matrix products is measured as well.
        is_tf32: True to measure the rate of TF32, too.
        is_toy: If True, takes few cases of each kind with an eighth of the lengths, as a smoke test.
    """
    make = _Maker(device, dtype, is_toy)
    found = [*_bandwidth(make), *_launches(make), *_matmuls(make), *_rates(make, others, is_tf32=is_tf32)]
    found += [*_attention(make), *_convolutions(make)]
    return [*found, *_pointwise(make), *_fused(make), *_gathers(make)]


SHARE = 1 / 16
"""A case is left out if its arguments and results take more than this part of the device's memory: all cases are there at once."""


@dataclass(frozen=True)
class _Maker:
    device: torch.device
    dtype: torch.dtype
    is_toy: bool

    def tensors(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], tuple[Tensor, ...]]:
        """Returns a function that draws random tensors of these shapes."""
        return lambda: tuple(torch.randn(shape, device=self.device).to(dtype) for shape in shapes)

    def factors(self, *shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Returns a function that draws random tensors in the dtype of products."""
        return self.tensors(*shapes, dtype=self.dtype)

    def size(self, length: int) -> int:
        """`length`; an eighth of it at toy size, and four times as much on GPUs, where shorter kernels would take no time."""
        if self.is_toy:
            return max(8, length // 8)
        return length if self.device.type == "cpu" else 4 * length

    def batch(self, count: int) -> int:
        """A number of images; four times `count` on GPUs, so that all multiprocessors have work."""
        return count if self.is_toy or self.device.type == "cpu" else 4 * count

    def elements(self, length: int, times: int = 64) -> int:
        """A length for elementwise kernels: `times` as much on GPUs, where any kernel takes microseconds."""
        return self.size(length) if self.is_toy or self.device.type == "cpu" else times * length

    def activations(self) -> Callable[[], tuple[Tensor, ...]]:
        """Returns a function that draws numbers above 0 to compute with: in float32 as many as the cache of a CPU holds, on GPUs
        64 Mi in the dtype of products, where reading them leaves arithmetic the time to show."""
        shape, is_cpu = (self.elements(64, 1024), 1024), self.device.type == "cpu"
        dtype = torch.float32 if is_cpu else self.dtype
        return lambda: ((torch.rand(shape, device=self.device) + 0.5).to(dtype),)

    def fits(self, *shapes: tuple[int, ...]) -> bool:
        """Returns whether tensors of these shapes in the dtype of products take at most `SHARE` of the memory of a GPU."""
        if self.device.type != "cuda":
            return True
        nbytes = sum(prod(shape) for shape in shapes) * self.dtype.itemsize
        return nbytes <= SHARE * torch.cuda.get_device_properties(self.device).total_memory

    def some(self, items: Sequence[Any], count: int) -> Sequence[Any]:
        """All items; at toy size the first `count`."""
        return items[:count] if self.is_toy else items


# -- memory -----------------------------------------------------------------------------------------------------------


def _bandwidth(make: _Maker) -> Iterator[Case]:
    for kib in map(make.size, make.some((512, 2048, 4096, 8192, 16384), 2)):
        count = kib * 256
        for name, function, operands in (("copy", torch.clone, 1), ("add", torch.add, 2)):
            arguments = make.tensors(*[(count,)] * operands)
            yield Case(f"{name} {kib} KiB", "bandwidth", function, arguments, is_cold=True)
    for kib in map(make.size, make.some((128, 256, 512), 1)):
        yield Case(f"copy {kib} KiB in cache", "cache", torch.clone, make.tensors((kib * 256,)))


CHAIN = 12
"""Number of products in a chain, so that the cost of one kernel can be separated from the cost of the call."""


def _launches(make: _Maker) -> Iterator[Case]:
    small = make.tensors((8, 8), (8, 8))
    yield Case("smallest product", "launch of products", torch.mm, small)
    yield Case("smallest product and kernel", "launch", smallest_kernels, small, compiled=True)


def smallest_kernels(x: Tensor, w: Tensor) -> Tensor:
    """`CHAIN` products, each with a fused kernel after it."""
    for _ in range(CHAIN):
        x = torch.relu(x @ w)
    return x


# -- products ---------------------------------------------------------------------------------------------------------

TOKENS = 2048
"""Rows of the products that train: tokens of a batch; four times as many on GPUs."""

_WEIGHTS = {"cpu": ((256, 256), (256, 1024), (1024, 256)), "gpu": ((2048, 2048), (2048, 8192), (2048, 50304))}
"""Inputs and outputs of the layers that train: a projection, an MLP and, on a GPU, a head."""

_MATMULS = (
    (1024, 1024, 1024),
    (512, 512, 512),
    (128, 128, 128),
    (32, 1024, 1024),
    (1024, 1024, 32),
    (4096, 64, 64),
)
_BATCHED = ((32, 256, 256, 64), (32, 256, 64, 256), (64, 64, 64, 64))
_BIASED = ((2048, 256, 256), (2048, 1024, 256), (2048, 256, 1024), (512, 512, 512))
_OTHER_TYPES = ((2048, 1024, 256), (1024, 1024, 1024), (512, 512, 512))


def _matmuls(make: _Maker) -> Iterator[Case]:
    yield from _layers(make)
    for m, n, k in _sized(make, _MATMULS, 2):
        arguments = make.factors((m, k), (k, n))
        yield Case(f"mm {m}x{n}x{k}", "matmul", torch.mm, arguments, is_cold=m * n * k > 1 << 22)
    for b, m, n, k in make.some(_BATCHED, 1):
        m, n, k = (make.size(length) for length in (m, n, k))
        arguments = make.factors((b, m, k), (b, k, n))
        yield Case(f"bmm {b}x{m}x{n}x{k}", "aten.bmm", torch.bmm, arguments, is_cold=True)
    for m, n, k in _sized(make, _BIASED, 1):
        arguments = make.factors((n,), (m, k), (k, n))
        yield Case(f"addmm {m}x{n}x{k}", "aten.addmm", torch.addmm, arguments, is_cold=True)


def _layers(make: _Maker) -> Iterator[Case]:
    """The three products of each linear layer: its result, and the gradients of its input and of its weight."""
    tokens, is_gpu = make.size(TOKENS), make.device.type != "cpu"
    for inputs, outputs in make.some(_WEIGHTS["gpu" if is_gpu else "cpu"], 1):
        if make.is_toy:
            inputs, outputs = make.size(inputs), make.size(outputs)
        x, w, y = (tokens, inputs), (outputs, inputs), (tokens, outputs)
        if not make.fits(x, w, y):
            continue
        text = f"{tokens}x{outputs}x{inputs}"
        yield Case(f"layer {text}", "matmul", _layer, make.factors(x, w), is_cold=True)
        yield Case(f"layer {text} gradient of input", "matmul", torch.mm, make.factors(y, w), is_cold=True)
        yield Case(f"layer {text} gradient of weight", "matmul", _weight_gradient, make.factors(y, x), is_cold=True)


def sustained_case(device: torch.device, dtype: torch.dtype, *, is_toy: bool = False) -> Case:
    """The product that is also measured without a pause: the last layer of those that train whose arguments fit."""
    make = _Maker(device, dtype, is_toy)
    return [case for case in _layers(make) if case.function is _layer][-1]


def _layer(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w.t())


def _weight_gradient(y: Tensor, x: Tensor) -> Tensor:
    return torch.mm(y.t(), x)


def _sized(make: _Maker, products: Sequence[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
    return [(make.size(m), make.size(n), make.size(k)) for m, n, k in make.some(products, count)]


def _rates(make: _Maker, dtypes: Sequence[torch.dtype], *, is_tf32: bool) -> Iterator[Case]:
    types: list[tuple[str, torch.dtype, Function]] = [
        (str(dtype).removeprefix("torch."), dtype, torch.mm) for dtype in dtypes
    ]
    types += [("tf32", torch.float32, _in_tf32)] if is_tf32 else []
    for name, dtype, function in types:
        for m, n, k in _sized(make, _OTHER_TYPES, 1):
            arguments = make.tensors((m, k), (k, n), dtype=dtype)
            yield Case(f"mm {m}x{n}x{k} {name}", f"rate {name}", function, arguments, is_cold=True)


def _in_tf32(a: Tensor, b: Tensor) -> Tensor:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return torch.mm(a, b)
    finally:
        torch.set_float32_matmul_precision(before)


_HEADS = {
    # batch, heads, tokens, width of a head, causal
    "cpu": (
        (8, 4, 256, 64, False),
        (8, 4, 128, 64, False),
        (2, 4, 1024, 64, False),
        (16, 8, 64, 32, False),
        (2, 8, 256, 128, False),
        (8, 4, 256, 64, True),
        (2, 4, 1024, 64, True),
    ),
    "gpu": (
        (64, 12, 512, 64, False),
        (8, 16, 2048, 64, True),
        (4, 16, 4096, 64, True),
        (2, 16, 8192, 64, True),
        (8, 16, 2048, 128, True),
        (4, 16, 4096, 128, True),
        (2, 16, 8192, 128, True),
    ),
}


def _attention(make: _Maker) -> Iterator[Case]:
    for b, h, t, d, is_causal in make.some(_HEADS["cpu" if make.device.type == "cpu" else "gpu"], 1):
        t = make.size(t) if make.is_toy else t
        arguments = make.factors(*[(b, t, h, d)] * 3)
        text = f"{b}x{h}x{t}x{d}" + " causal" * is_causal
        attend = _attention_of(is_causal)
        yield Case(f"attention {text}", "attention", attend, arguments, is_cold=True)
        yield Case(f"attention {text} with backward", "attention backward", _and_back(attend), arguments, is_cold=True)


def _attention_of(is_causal: bool) -> Function:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    return attend


_IMAGES = (
    # batch, channels in and out, side, kernel, stride, groups
    (8, 32, 64, 32, 3, 1, 1),
    (8, 64, 64, 16, 3, 1, 1),
    (8, 24, 24, 64, 3, 1, 1),
    (8, 64, 128, 32, 3, 2, 1),
    (8, 128, 128, 16, 1, 1, 1),
    (8, 3, 32, 64, 3, 1, 1),
    (8, 64, 64, 32, 7, 1, 64),
)


def _convolutions(make: _Maker) -> Iterator[Case]:
    for b, cin, cout, side, kernel, stride, groups in make.some(_IMAGES, 1):
        b = make.batch(b)
        image, weight = (
            (b, cin, max(8, make.size(side)), max(8, make.size(side))),
            (cout, cin // groups, kernel, kernel),
        )
        images = make.factors(image, weight)
        if make.device.type != "cpu":  # on CPUs Inductor leaves convolutions as the model has them
            images = _channels_last(images)
        forward = _convolution(stride, kernel // 2, groups)
        text = f"{b}x{cin}->{cout} {side}x{side} by {kernel}" + f", {groups} groups" * (groups > 1)
        group = "conv" if groups == 1 else "depthwise"
        yield Case(f"conv {text}", group, forward, images, is_cold=True)
        yield Case(f"conv {text} with backward", f"{group} backward", _and_back(forward), images, is_cold=True)


def _channels_last(draw: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(x.contiguous(memory_format=torch.channels_last) for x in draw())


def _convolution(stride: int, padding: int, groups: int) -> Function:
    return lambda x, w: F.conv2d(x, w, stride=stride, padding=padding, groups=groups)


def _and_back(forward: Function) -> Function:
    """A function that runs the forward and computes the gradients of all arguments, with the result as the tangent."""

    def run(*arguments: Tensor) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in arguments]
        with torch.enable_grad():
            out = forward(*leaves)
            return torch.autograd.grad(out, leaves, out.detach())

    return run


# -- arithmetic of fused kernels --------------------------------------------------------------------------------------

FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "log1p")
"""Operators whose arithmetic is measured one by one, as eager kernels: the same vector code as in fused kernels. The time of a
copy of the same size is subtracted; what is left is what the operator adds to a kernel that moves its data anyway."""


def _pointwise(make: _Maker) -> Iterator[Case]:
    yield Case("copy for comparison", "baseline", lambda x: torch.clone(x), make.activations())
    for name in make.some(FUNCTIONS, 2):
        yield Case(name, f"aten.{name}", getattr(torch, name), make.activations())


POLYNOMIAL = 96
"""Multiply-adds for each element of the kernel that measures plain arithmetic: longer than its traffic, on a GPU too."""


def polynomial(x: Tensor) -> Tensor:
    """`POLYNOMIAL` multiply-adds for each element, each of which depends on the one before."""
    y = x
    for _ in range(POLYNOMIAL):
        y = y * x + 0.5
    return y


def dropout_mask(x: Tensor) -> Tensor:
    """Dropout without scaling: draws one random number for each element."""
    return (torch.rand_like(x) > 0.1).to(x.dtype) * x


def variance(x: Tensor) -> Tensor:
    """Mean and variance of each row, as of a layer norm."""
    var, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return var + mean


def sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums along the rows, and along the columns as for a bias gradient: two kernels."""
    return x.sum(-1), x.sum(0)


def _fused(make: _Maker) -> Iterator[Case]:
    rows = make.tensors((make.elements(2048), 256))
    yield Case("polynomial", "pointwise", polynomial, make.activations(), compiled=True)
    yield Case("random numbers", "prims.inductor_random", dropout_mask, rows, compiled=True)
    if not make.is_toy:
        yield Case("variances of rows", "aten.var_mean", variance, rows, compiled=True)
        yield Case("sums of rows and of columns", "reduction", sums, rows, compiled=True)


# -- gathers and scatters -----------------------------------------------------------------------------------------------


def _gathers(make: _Maker) -> Iterator[Case]:
    table, count, width = (make.size(n) for n in (8192, 4096, 256))

    def arguments() -> tuple[Tensor, ...]:
        places = torch.randint(table, (count,), device=make.device)
        return torch.randn(table, width, device=make.device), places

    def gradients() -> tuple[Tensor, ...]:
        places = torch.randint(table, (count,), device=make.device)
        return torch.randn(count, width, device=make.device), places

    def scatter(gradient: Tensor, places: Tensor) -> Any:
        return torch.ops.aten.embedding_dense_backward.default(gradient, places, table, -1, False)

    def gather(weight: Tensor, places: Tensor) -> Any:
        return torch.ops.aten.embedding.default(weight, places)

    def add_at(gradient: Tensor, places: Tensor) -> Tensor:
        return torch.zeros(table, width, device=make.device).index_put((places,), gradient, accumulate=True)

    yield Case("gather rows", "aten.embedding", gather, arguments, is_cold=True)
    yield Case("scatter rows", "aten.embedding_dense_backward", scatter, gradients, is_cold=True)
    yield Case("add at rows", "aten.index_put", add_at, gradients, is_cold=True)
