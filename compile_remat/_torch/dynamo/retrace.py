"""The inputs of a traced graph as if Dynamo had seen other sizes first.

Code for a graph of dynamic sizes is specialised by the sizes seen first, and torch adds guards for its assumptions about them.  A
graph that is first compiled in a later step, at other sizes, is traced in a shape environment of its own, whose guards the caller
checks at each call.

Private names of torch, 2.11 to 2.15: of ``ShapeEnv``, `create_symbol`, `create_symintnode`, `backed_var_to_val`, `var_to_range`,
`var_to_sources` and `guards`; ``torch._dynamo.exc.RestartAnalysis``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from compile_remat._torch.version import private_name

RestartAnalysis = private_name("torch._dynamo.exc", "RestartAnalysis")
"""Raised while a graph is compiled to let Dynamo trace it anew, such as with a float as a constant that had varied."""


def guards_hold(inputs: Sequence[Any], sizes: Iterable[tuple[str, int]]) -> bool:
    """Returns whether all guards on the symbols of these inputs hold at these sizes; False if a guard has another symbol."""
    environment, known = _environment(inputs), dict(sizes)
    for guard in () if environment is None else environment.guards:
        symbols = guard.expr.free_symbols
        if any(symbol.name not in known for symbol in symbols):
            return False
        if guard.expr.xreplace({symbol: sympy.Integer(known[symbol.name]) for symbol in symbols}) != sympy.true:
            return False
    return True


def inputs_at(inputs: Sequence[Any], sizes: Mapping[str, int]) -> list[Any] | None:
    """Returns inputs with the same symbols and with `sizes` as their hints.

    Returns None if an input is no plain tensor, two share memory, or one is a SymFloat or SymBool.
    """
    before = _environment(inputs)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    storages = {t.untyped_storage()._cdata for t in tensors if _is_plain(t)}
    if before is None or len(storages) < len(tensors):
        return None
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in inputs):
        return None
    seen = _SeenAt(before, sizes)
    return [seen.value(value) for value in inputs]


def _environment(inputs: Sequence[Any]) -> ShapeEnv | None:
    return next((v.fake_mode.shape_env for v in inputs if isinstance(v, FakeTensor)), None)


def _is_plain(tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return False
    return (
        type(tensor.storage_offset()) is int
        and tensor.storage_offset() == 0
        and not (tensor.is_conj() or tensor.is_neg())
    )


class _SeenAt:
    """A shape environment with the symbols of another one, each with another size as its hint."""

    def __init__(self, before: ShapeEnv, sizes: Mapping[str, int]) -> None:
        self._environment = environment = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        self._symbols: dict[Any, Any] = {}
        for symbol, sources in before.var_to_sources.items():
            if symbol.name in sizes:
                found = environment.create_symbol(
                    sizes[symbol.name], sources[0], DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
                )
                environment.var_to_range[found] = before.var_to_range[symbol]
                self._symbols[symbol] = found
        self._hints = environment.backed_var_to_val

    def value(self, value: Any) -> Any:
        """Returns a tensor or a SymInt in the new environment, and any other value unchanged."""
        if isinstance(value, torch.SymInt):
            return self._size(value)
        return self._tensor(value) if isinstance(value, torch.Tensor) else value

    def _size(self, size: Any) -> Any:
        if type(size) is int:
            return size
        expression = size.node.expr.xreplace(self._symbols)
        return self._environment.create_symintnode(expression, hint=int(expression.xreplace(self._hints)))

    def _tensor(self, before: torch.Tensor) -> torch.Tensor:
        shape, strides = [[self._size(n) for n in of] for of in (before.shape, before.stride())]
        with self._mode, torch.enable_grad():
            found = torch.empty_strided(shape, strides, dtype=before.dtype, device=before.device)
            if isinstance(before, torch.nn.Parameter):
                return torch.nn.Parameter(found, requires_grad=before.requires_grad)
            found.requires_grad_(before.requires_grad)
            return found if before.is_leaf else found.view_as(found)
