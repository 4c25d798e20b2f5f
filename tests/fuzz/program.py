"""Random models as plain data: a `Program` is a list of instructions on named registers, and prints as its own source.

The repr of a program is a literal that makes it again, so that a failure can be pasted into a test.  `source` is the Python
function that it stands for; Dynamo and AOTAutograd trace that function, not an interpreter.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from tests.fuzz.kinds import NAMESPACE, RANDOM, TEMPLATES

INDENT = "    "


class _Short:
    """A repr without names and without trailing defaults: regressions are read by people."""

    def __repr__(self) -> str:
        pairs = [(getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        while pairs and pairs[-1][0] == pairs[-1][1]:
            pairs.pop()
        return f"{type(self).__name__}({', '.join(repr(value) for value, _ in pairs)})"


@dataclass(frozen=True, repr=False)
class Leaf(_Short):
    """A tensor that the program is given.

    Attributes:
        role: `input` (no gradient), `differentiable` (an input with one), `parameter`, `frozen` (a parameter without
            gradient) or `buffer`.
        high: Integers are drawn below this.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str = "float64"
    high: int = 0

    def make(self) -> torch.Tensor:
        """Values of moderate size, from the default generator."""
        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            return torch.randint(0, max(1, self.high), self.shape, dtype=dtype)
        # Drawn in float64, so that the same values stand behind every dtype.
        tensor = torch.randn(self.shape, dtype=torch.float64).mul_(0.7).to(dtype)
        return tensor.requires_grad_(self.role in ("differentiable", "parameter"))


@dataclass(frozen=True, repr=False)
class Op(_Short):
    """One instruction: ``out = template(args, attrs)``, or a region that runs `body` and yields its last register.

    Attributes:
        out: The register written, or several, separated by commas.
        kind: A key of `TEMPLATES`, one of `REGIONS`, or `graph_break`, which hands its argument on.
    """

    out: str
    kind: str
    args: tuple[str, ...]
    attrs: tuple[Any, ...] = ()
    body: tuple[Op, ...] = ()

    def lines(self) -> Iterator[str]:
        """The statements that the instruction stands for."""
        if self.kind == "graph_break":
            yield from ("torch._dynamo.graph_break()", f"{self.out} = {self.args[0]}")
            return
        if self.kind not in REGIONS:
            letters = dict(zip("abc", map(str, self.attrs), strict=False))
            yield f"{self.out} = {TEMPLATES[self.kind].format(*self.args, args=', '.join(self.args), **letters)}"
            return
        body = [INDENT + line for op in self.body for line in op.lines()]
        result = self.body[-1].out
        carried, source = self.args
        if self.kind == "checkpoint":
            yield from (f"def region_{self.out}({carried}):", *body, f"{INDENT}return {result}")
            yield f"{self.out} = checkpoint(region_{self.out}, {source}, use_reentrant={self.attrs[0]!r})"
        else:
            head = HEADS.get(self.kind) or f"for _ in range({self.attrs[0]}):"
            yield from (
                f"{carried} = {source}",
                head,
                *body,
                f"{INDENT}{carried} = {result}",
                f"{self.out} = {carried}",
            )

    def walk(self) -> Iterator[Op]:
        """The instruction and those inside."""
        yield self
        for op in self.body:
            yield from op.walk()


HEADS = {"no_grad": "with torch.no_grad():", "autocast": "with torch.autocast('cpu', torch.bfloat16):"}
REGIONS = ("checkpoint", "loop", *HEADS)
"""Kinds with a body; their `args` are the carried value's register inside the body, and the register it comes from."""


@dataclass(frozen=True)
class Program:
    """A model: its leaves, its instructions, its outputs."""

    leaves: tuple[Leaf, ...]
    body: tuple[Op, ...]
    outputs: tuple[str, ...]

    @property
    def kinds(self) -> list[str]:
        """The kind of every instruction, regions' included."""
        return [op.kind for top in self.body for op in top.walk()]

    @property
    def is_rounded(self) -> bool:
        """True if the program has bfloat16 values, which a fused kernel rounds less often than eager mode."""
        return "bfloat16" in repr(self) or "autocast" in self.kinds

    @property
    def is_random(self) -> bool:
        """True if the program draws random numbers."""
        return not RANDOM.isdisjoint(self.kinds)

    def without_checkpoints(self) -> Program:
        """The same computation with nothing to be done twice."""
        plain = (replace(op, kind="loop", attrs=(1,)) if op.kind == "checkpoint" else op for op in self.body)
        return replace(self, body=tuple(plain))

    @property
    def source(self) -> str:
        """The function as Python text."""
        lines = [f"def program({', '.join(leaf.name for leaf in self.leaves)}):"]
        lines += [INDENT + line for op in self.body for line in op.lines()]
        return "\n".join([*lines, f"{INDENT}return ({', '.join(self.outputs)},)", ""])

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function itself; its arguments are the leaves."""
        source = self.source
        name = f"<fuzz {abs(hash(source)):x}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # for stack traces
        namespace = dict(NAMESPACE)
        exec(compile(source, name, "exec"), namespace)
        function: Callable[..., tuple[torch.Tensor, ...]] = namespace["program"]
        return function

    def tensors(self) -> list[torch.Tensor]:
        """Fresh leaves, the same ones every time."""
        torch.manual_seed(0)
        return [leaf.make() for leaf in self.leaves]

    def module(self) -> tuple[nn.Module, list[torch.Tensor]]:
        """The program as a module, and its inputs."""
        return _Module(self), [
            tensor
            for leaf, tensor in zip(self.leaves, self.tensors(), strict=True)
            if leaf.role in ("input", "differentiable")
        ]


class _Module(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.function = program.function()
        self.names = [(leaf.name, leaf.role in ("input", "differentiable")) for leaf in program.leaves]
        for leaf, tensor in zip(program.leaves, program.tensors(), strict=True):
            if leaf.role == "buffer":
                self.register_buffer(leaf.name, tensor)
            elif leaf.role in ("parameter", "frozen"):
                self.register_parameter(leaf.name, nn.Parameter(tensor.detach(), leaf.role == "parameter"))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(inputs)
        return self.function(*[given.pop(0) if is_input else getattr(self, name) for name, is_input in self.names])
