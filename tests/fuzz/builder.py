"""A program while it is drawn: each instruction runs on real tensors immediately.

Running while drawing keeps every program valid whatever the shapes do, and sees the values: what grows too large is
tamed at once.  Draws count back from the newest register, so that a program with an instruction taken out is still a
likely one, and failures shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from tests.fuzz.kinds import NAMESPACE
from tests.fuzz.program import Leaf, Op

T = TypeVar("T")

TOO_LARGE = 20.0
"""Values beyond this are squashed."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors that are drawn.

    Attributes:
        shapes: Possible shapes of the first input.
        largest: Elements of a tensor that may still grow.
        widths: Output features of linear layers, beside the input's.
        rows: Batch sizes of integer inputs.
        image, signal: Shapes of the inputs of convolutions in two dimensions and in one.
    """

    shapes: tuple[tuple[int, ...], ...] = ((2, 3), (2, 3, 4), (4,), (2, 2, 4, 4), (2, 2, 3, 2), (3, 3))
    largest: int = 160
    widths: tuple[int, ...] = (2, 3, 4, 5)
    rows: tuple[int, int] = (2, 3)
    image: tuple[int, ...] = (2, 2, 4, 4)
    signal: tuple[int, ...] = (2, 3, 5)


SMALL = Sizes()
LARGE = Sizes(
    shapes=((96, 48), (12, 40, 32), (3000,), (8, 6, 20, 20), (6, 8, 24, 16), (64, 64)),
    largest=50_000,
    widths=(16, 24, 40, 64),
    rows=(16, 24),
    image=(8, 4, 20, 20),
    signal=(12, 16, 40),
)
"""Sizes at which activations make up a step's peak, not torch's own allocations while it compiles."""

OVERLAPPING = frozenset({"unfold", "as_strided", "expand"})


@dataclass
class Register:
    """Facts about a drawn value, beside the tensor itself.

    Attributes:
        level: Number of regions around the instruction that made the value.
        frozen: True if torch refuses to change its memory (a leaf with gradient, one of several views, an expansion).
        overlaps: True if several of its elements share memory.
    """

    name: str
    level: int
    frozen: bool = False
    overlaps: bool = False


@dataclass
class Builder:
    """A program being drawn."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    dtype: str
    with_checkpoints: bool
    sizes: Sizes = SMALL
    leaves: list[Leaf] = field(default_factory=list)
    body: list[Op] = field(default_factory=list)
    registers: list[Register] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=lambda: dict(NAMESPACE))
    regions: list[str] = field(default_factory=list)
    checkpointed: set[str] = field(default_factory=set)
    count: int = 0

    # -- draws --------------------------------------------------------------------------------------------------------

    def choose(self, options: Sequence[T]) -> T:
        """One of them; the first is the simplest."""
        return options[self.draw(st.integers(0, len(options) - 1))]  # type: ignore[no-any-return]

    def chance(self, one_in: int) -> bool:
        """True once in so many times."""
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def pick(self, fits: Callable[[torch.Tensor], bool] = lambda t: True, floating: bool = True) -> str | None:
        """A register with such a value, the newest first; None where there is none."""
        names = [
            r.name
            for r in reversed(self.registers)
            if self[r.name].is_floating_point() == floating and fits(self[r.name])
        ]
        return self.choose(names) if names else None

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.environment[name]
        return tensor

    # -- what is written ----------------------------------------------------------------------------------------------

    def leaf(
        self, role: str, shape: Sequence[int], dtype: str | None = None, high: int = 0, other_than: str = ""
    ) -> str:
        """A leaf of that kind: one that is there (weights are shared then), or a new one."""
        wanted = (role, tuple(shape), dtype or self.dtype, high)
        alike = [x.name for x in self.leaves if (x.role, x.shape, x.dtype, x.high) == wanted and x.name != other_than]
        if alike and not self.chance(3):
            return self.choose(alike)
        name = f"{role[0]}{len(self.leaves)}"
        leaf = Leaf(name, *wanted)
        self.leaves.append(leaf)
        self.environment[name] = leaf.make()
        return name

    def weight(self, shape: Sequence[int], like: str) -> str:
        """A parameter of the dtype of a register; rarely one that gets no gradient."""
        role = "frozen" if self.chance(12) else "parameter"
        return self.leaf(role, shape, str(self[like].dtype).removeprefix("torch."))

    def input(self, shape: Sequence[int], dtype: str | None = None, high: int = 0, role: str = "input") -> str:
        """An input, known as a register too."""
        name = self.leaf(role, shape, dtype, high)
        if all(r.name != name for r in self.registers):
            self.registers.append(Register(name, 0, frozen=role != "input"))
        return name

    def emit(self, kind: str, args: Sequence[str], attrs: Sequence[Any] = (), outs: int = 1) -> list[str]:
        """Append an instruction, run it, and tame what came out."""
        names = [f"v{self.count + k}" for k in range(outs)]
        self.count += outs
        op = Op(", ".join(names), kind, tuple(args), tuple(attrs))
        exec("\n".join(op.lines()), self.environment)
        self.body.append(op)
        return [self._keep(name, outs > 1, kind in OVERLAPPING) for name in names]

    def _keep(self, name: str, one_of_several: bool, overlaps: bool) -> str:
        tensor = self[name]
        frozen = one_of_several or overlaps or _is_frozen(tensor)
        self.registers.append(Register(name, len(self.regions), frozen, overlaps))
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return name
        if tensor.detach().abs().max() > TOO_LARGE:
            return self.emit("tanh", [name])[0]
        return name

    def is_given(self, name: str) -> bool:
        """True if the named value shares memory with a leaf."""
        return pointer(self[name]) in {pointer(self[leaf.name]) for leaf in self.leaves}

    def changeable(self) -> str | None:
        """A register that may be written to: no leaf with gradient, nothing that a checkpoint reads when it runs again."""
        outer = [r.name for r in self.registers if r.level < len(self.regions)] + [x.name for x in self.leaves]
        kept = [r.name for r in self.registers if r.frozen or r.name in self.checkpointed]
        if {"checkpoint", "no_grad"} & set(self.regions):
            kept += outer
        pointers = {pointer(self[name]) for name in kept}
        names = [
            r.name
            for r in reversed(self.registers)
            if self[r.name].is_floating_point() and pointer(self[r.name]) not in pointers
        ]
        return self.choose(names) if names else None


def pointer(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


def _is_frozen(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    expanded = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return expanded or (base.is_leaf and base.requires_grad) or (tensor._is_view() and not base.requires_grad)


def void(_: object) -> None:
    """Drops a result, so that an instruction can end in a return."""
