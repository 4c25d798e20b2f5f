"""Runs emitted Triton code on CPU tensors in Triton's interpreter, and compares loss and gradients with eager mode's.

    TRITON_INTERPRET=1 python -m tests.cuda_codegen.jobs.interpret '{"out": FILE, "dtype": "float32", "dropout": false}'

The file is what `emit` wrote.  Prints one line of JSON: the largest difference of a gradient relative to its largest number, and
the same for eager mode in that dtype; both are against eager mode in float64.
"""

from __future__ import annotations

import itertools
import json
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter

from benchmarks.models.building import converted
from tests.cuda_codegen import toys

SEED = 5
ON_CPU = (
    (r"_empty_strided_cuda", "_empty_strided_cpu"),
    (r"with torch\.cuda\._DeviceGuard\(\d\):", "if True:"),
    (r"torch\.cuda\.set_device\(\d\)", "pass"),
    (r"device='cuda:0'", "device='cpu'"),
    (r"device=device\(type='cuda', index=0\)", "device='cpu'"),
    (r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = lambda index: 0"),
)


class Libdevice:
    """CUDA's own functions are external, and nothing in the interpreter: Triton's stand in for them."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tl.math, name)

    @staticmethod
    def tanh(x: Any) -> Any:
        return 2 * tl.sigmoid(2 * x) - 1

    @staticmethod
    def isnan(x: Any) -> Any:
        return x != x


def copy_broadcast_operands() -> None:
    """Triton's interpreter (3.7.0) reads a mask of one element that is broadcast to [1, N] as if its N elements lay in memory.

    Numpy gives the C++ side of ``tl.atomic_add`` a view with stride 0, so what is added depends on the bytes behind it: with a
    block of one row, plain torch.compile's gradient of an embedding is as wrong as ours.
    """
    builder: Any = interpreter.InterpreterBuilder
    create = builder.create_atomic_rmw

    def create_from_copies(self: object, op: object, ptr: Any, val: Any, mask: Any, *args: object) -> Any:
        for operand in (ptr, val, mask):
            operand.data = np.array(operand.data, order="C")
        return create(self, op, ptr, val, mask, *args)

    builder.create_atomic_rmw = create_from_copies


def round_to_bfloat16() -> None:
    """Triton's interpreter (3.7.0) cuts float32 numbers off where a GPU rounds them to the nearest bfloat16.

    Cut-off numbers are twice as far off, so that the gradients of emitted code were twice as far from float64's as eager mode's.
    """
    convert = interpreter._convert_float

    def convert_rounded(data: Any, source: object, target: object, rounding_mode: object) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding_mode)
        return torch.from_numpy(np.array(data, order="C")).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = convert_rounded


def function_of(source_code: str) -> Callable[[list[Any]], Sequence[Any]]:
    """The wrapper's `call`, for CPU tensors."""
    for pattern, text in ON_CPU:
        source_code = re.sub(pattern, text, source_code)
    call: Callable[[list[Any]], Sequence[Any]] = PyCodeCache.load(source_code).call
    return call


@triton.jit  # type: ignore[untyped-decorator]
def draw(seed: Any, out: Any, count: tl.constexpr) -> None:
    places = tl.arange(0, count)
    tl.store(out + places, tl.rand(tl.load(seed), places))


@triton.jit  # type: ignore[untyped-decorator]
def draw_four_at_once(seed: Any, out: Any, count: tl.constexpr) -> None:
    places = tl.arange(0, count)
    tl.store(out + places, triton_helpers.rand4x(tl.load(seed), places, count))


DRAWS = (draw, draw_four_at_once) if hasattr(triton_helpers, "rand4x") else (draw,)
"""Kernels that draw as Inductor's do: reductions draw one number at a time, pointwise kernels four from 2.13 on."""


class Dropout:
    """Drops what Inductor's Triton code drops: the k-th call draws from the k-th seed, by each element's place.

    Args:
        draws: For each call, the kernel that draws its numbers, one of `DRAWS`.
    """

    def __init__(self, seeds: Tensor, draws: Sequence[Any]) -> None:
        self.seeds, self.draws, self.calls = seeds, draws, 0

    def __call__(self, x: Tensor) -> Tensor:
        drawn = torch.empty(x.numel())
        self.draws[self.calls][(1,)](self.seeds[self.calls :], drawn, x.numel())
        self.calls += 1
        kept = drawn > toys.RATE  # in float32: inside of one kernel Inductor rounds nothing
        return x * kept.view(x.shape) / (1 - toys.RATE)


def eager(dtype: torch.dtype, draws: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of eager mode, the toy's weights rounded to the job's dtype first; without `draws`, without dropout."""
    torch.manual_seed(SEED)
    seeds = torch.randint(-(2**63), 2**63 - 1, (toys.BLOCKS,))
    module, inputs = toys.make(Dropout(seeds, draws) if draws else None)
    converted(module, JOB_DTYPE)
    converted(module, dtype)
    loss = module(*inputs)
    loss.backward()
    return loss.detach(), [p.grad for p in module.parameters() if p.grad is not None]


def interpreted(out: str, dropout: bool) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the emitted code, in the order of the parameters."""
    module, inputs = toys.make(toys.drop if dropout else None)
    converted(module, JOB_DTYPE)
    taken: list[list[Any]] = []

    def take(gm: Any, example_inputs: Sequence[Any]) -> Any:
        taken.append(list(example_inputs))
        return gm.forward

    torch.compile(module, backend=take)(*inputs)
    (forward, names, num_outputs), (backward, back_names, _) = pickle.loads(Path(out).read_bytes())
    given = {f"primals_{k + 1}": value.detach() for k, value in enumerate(taken[0])}
    torch.manual_seed(SEED)
    returned = function_of(forward)([given[name] for name in names])
    handed = [name for name in back_names if not name.startswith("tangents")]
    first_saved = num_outputs - len(handed)
    saved = dict(zip(handed, returned[first_saved:], strict=True))
    loss = returned[0]
    made = function_of(backward)([saved.get(name, torch.ones_like(loss)) for name in back_names])
    by_parameter = {id(value): gradient for value, gradient in zip(taken[0], made, strict=True)}
    return loss, [by_parameter[id(p)] for p in module.parameters()]


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference relative to the largest number of its tensor."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    JOB_DTYPE = getattr(torch, job["dtype"])
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_helpers.libdevice = Libdevice()
    copy_broadcast_operands()
    round_to_bfloat16()
    loss, gradients = interpreted(job["out"], job["dropout"])
    found = []
    for draws in itertools.product(DRAWS, repeat=toys.BLOCKS) if job["dropout"] else [()]:
        exact_loss, exact = eager(torch.float64, draws)
        found.append((error(gradients, exact), draws, abs(float(loss) / float(exact_loss) - 1), exact))
    worst, draws, loss_error, exact = min(found, key=lambda each: each[0])
    _, plain = eager(JOB_DTYPE, draws)
    figures = {"error": worst, "eager_error": error(plain, exact), "loss_error": loss_error}
    print(json.dumps({"gradients": len(gradients), **figures}))
