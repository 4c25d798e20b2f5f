"""The names that a wrapper of Inductor's may use in a dry run, and what stands for each.

A wrapper is evaluated with these names and no builtins.  Its header is the same in torch 2.11 to 2.15, but for what newer versions
add: checks, and from 2.13 on, on GPUs, copies of inputs that are not aligned.  Inputs are taken to be: the allocator aligns.
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
"""Builtins that expressions of sizes use."""


CONSTANT = re.compile(
    r"^(?P<name>\w+) = None  # device\(type='(?P<type>\w+)'(?:, index=\d+)?\) "
    r"torch\.(?P<dtype>\w+) \((?P<size>[\d, ]*)\) \((?P<stride>[\d, ]*)\) ",
    re.MULTILINE,
)
"""How the header writes a constant of the graph, which Inductor sets once the module is loaded."""


class Nothing:
    """Stands for a kernel, a check or a stream: may be called, indexed by attribute, and does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None

    def __getattr__(self, name: str) -> Nothing:
        return self


class Extern:
    """``extern_kernels``: a call is run for the sizes of its result, or where it writes into `out` for who watches operators."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, out: object = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(torch.ops.aten, name)(*args, **kwargs)
            if hasattr(torch.ops.aten, name):
                getattr(torch.ops.aten, name)(*args, **kwargs)
            return None

        return call


def names_of(module: ast.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The names that the functions of an output code see: those of its header, its kernels and its constants."""
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
    """The constants that an output code reads, by name, with nothing in them."""
    return {
        found["name"]: torch.empty_strided(
            _ints(found["size"]), _ints(found["stride"]), dtype=getattr(torch, found["dtype"]), device=found["type"]
        )
        for found in CONSTANT.finditer(source_code)
    }


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _kernels(module: ast.Module) -> list[str]:
    """The variables of the module that ``async_compile`` makes: kernels of C++ and Triton, also a user's own."""
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
