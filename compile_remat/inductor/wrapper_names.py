"""The names that Inductor's wrapper may use in a dry run, and a stand-in for each.

A dry run refuses all other names, most builtins among them.  The wrapper's header is the same in torch 2.11 to 2.15, except for
additions: checks and, from 2.13 on, copies of misaligned inputs on GPUs.  The dry run takes all inputs as aligned, as the allocator
aligns them.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment", "assert_tensor_metadata")
"""Functions of the wrapper's header that check an input and return nothing; the second is new in 2.14, the last in 2.15."""

ARITHMETIC = (abs, bool, float, int, max, min, round, tuple)
"""Builtins that size expressions use."""


CONSTANT = re.compile(
    r"^(?P<name>\w+) = None  # device\(type='(?P<type>\w+)'(?:, index=\d+)?\) "
    r"torch\.(?P<dtype>\w+) \((?P<size>[\d, ]*)\) \((?P<stride>[\d, ]*)\) ",
    re.MULTILINE,
)
"""The header's line for a constant of the graph, which Inductor sets once the module is loaded."""


class Nothing:
    """Stand-in for a kernel, a check or a stream: a call does nothing, and each attribute is the stand-in itself."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None

    def __getattr__(self, name: str) -> Nothing:
        return self


class Extern:
    """Stand-in for ``extern_kernels``: runs a call for the sizes of its result or, with `out`, for modes that watch operators."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, out: object = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(torch.ops.aten, name)(*args, **kwargs)
            if hasattr(torch.ops.aten, name):
                getattr(torch.ops.aten, name)(*args, **kwargs)
            return None

        return call


def names_of(module: ast.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The names that the functions of an output code see: names of its header, its kernels and its constants."""
    return {
        **constants,
        **{function.__name__: function for function in ARITHMETIC},
        **dict.fromkeys([*CHECKS, "get_raw_stream", *_kernels(module)], Nothing()),
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "device": torch.device,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "_quantized": torch.ops._quantized,
        "copy_if_misaligned": lambda tensor: tensor,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": _empty("cpu"),
        "empty_strided_cpu_pinned": _empty("cpu"),
        "empty_strided_cuda": _empty("cuda"),
        "reinterpret_tensor": _reinterpret,
        "extern_kernels": Extern(),
    }


def constants_of(source_code: str) -> dict[str, torch.Tensor]:
    """The constants that an output code reads, by name, as uninitialised tensors."""
    return {
        found["name"]: torch.empty_strided(
            _ints(found["size"]), _ints(found["stride"]), dtype=getattr(torch, found["dtype"]), device=found["type"]
        )
        for found in CONSTANT.finditer(source_code)
    }


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _kernels(module: ast.Module) -> list[str]:
    """The module's variables that ``async_compile`` assigns: C++ and Triton kernels, also a user's own."""
    return [
        target.id
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and ast.unparse(statement.value.func.value) == "async_compile"
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]


def _empty(device: str) -> Any:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
