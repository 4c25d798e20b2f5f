"""The hypothesis strategy for programs: one instruction after the other, run on real tensors as it is drawn.

Running while drawing keeps every program valid whatever the shapes do, and sees the values: what grows too large is tamed at
once.  Draws count back from the newest register, so that a program with an instruction taken out is still a likely one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.correctness.harness import weighted_sum
from tests.fuzz.check import Trial
from tests.fuzz.kinds import (
    ALONG,
    BINARY,
    IN_PLACE,
    IN_PLACE_BINARY,
    NAMESPACE,
    RANDOM_KINDS,
    REDUCTIONS,
    UNARY,
    VIEWS,
)
from tests.fuzz.program import Leaf, Op, Program

T = TypeVar("T")

REFUSED = ("modified by an inplace operation", "backward through the graph a second time")
"""What eager mode says of a program that changes what its backward reads, and of a reentrant checkpoint whose body reads
another value with a gradient."""

LARGEST = 160
"""Elements of a tensor that may still grow."""

TOO_LARGE = 20.0
"""Values beyond this are squashed."""

BUDGETS = ("min", "max", 0.5, 0.8, 0.3, 1.0)

MAX_OPS = 14
MAX_BODY = 4


@dataclass
class Register:
    """What the drawing knows of a value, beside the tensor itself.

    Attributes:
        level: How many regions deep it was made.
        frozen: Whether torch refuses to change its memory (a leaf with gradient, one of several views, an expansion).
    """

    name: str
    level: int
    frozen: bool = False


@dataclass
class Builder:
    """A program being drawn."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    dtype: str
    with_regions: bool
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
        return [self._keep(name, outs > 1) for name in names]

    def _keep(self, name: str, one_of_several: bool) -> str:
        tensor = self[name]
        self.registers.append(Register(name, len(self.regions), one_of_several or _is_frozen(tensor)))
        if not tensor.is_floating_point() or tensor.numel() == 0:
            return name
        if tensor.detach().abs().max() > TOO_LARGE:
            return self.emit("tanh", [name])[0]
        return name

    def changeable(self) -> str | None:
        """A register that may be written to: no leaf with gradient, nothing that a checkpoint reads when it runs again."""
        outer = [r.name for r in self.registers if r.level < len(self.regions)] + [x.name for x in self.leaves]
        kept = [r.name for r in self.registers if r.frozen or r.name in self.checkpointed]
        if {"checkpoint", "no_grad"} & set(self.regions):
            kept += outer
        pointers = {_pointer(self[name]) for name in kept}
        names = [
            r.name
            for r in reversed(self.registers)
            if self[r.name].is_floating_point() and _pointer(self[r.name]) not in pointers
        ]
        return self.choose(names) if names else None


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_frozen(tensor: torch.Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    expanded = any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return expanded or (base.is_leaf and base.requires_grad) or (tensor._is_view() and not base.requires_grad)


# -- instructions -----------------------------------------------------------------------------------------------------


def unary(b: Builder) -> None:
    kind = b.choose(list(UNARY))
    if kind in ("fft", "fft_product", "as_complex"):
        x = b.pick(lambda t: t.dim() > 0 and t.dtype in (torch.float32, torch.float64) and t.numel() <= LARGEST)
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
    other = b.pick(lambda t: _expands_to(t, b[x]) and _pointer(t) != _pointer(b[x]))
    return unary(b) if other is None else void(b.emit(b.choose(list(IN_PLACE_BINARY)), [x, other]))


def binary(b: Builder) -> None:
    x = b.pick()
    assert x is not None
    other = b.pick(lambda t: _broadcast_numel(t, b[x]) <= LARGEST)
    b.emit(b.choose(list(BINARY)), [x, other or x])


def linear(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and 0 < t.shape[-1])
    if x is None:
        return unary(b)
    size, width = b.choose((2, 3, 4, 5)), b[x].shape[-1]
    size = size if not b.chance(2) else width
    if b.chance(2):
        return void(b.emit("linear_bias", [x, b.weight((size, width), x), b.weight((size,), x)]))
    return void(b.emit(b.choose(("linear", "matmul", "einsum_mix", "bilinear")), *_mixing(b, x, size, width)))


def _mixing(b: Builder, x: str, size: int, width: int) -> tuple[list[str]]:
    # `linear` takes its weight the other way round; a square one fits all of them.
    del size
    return ([x, b.weight((width, width), x)],)


def products(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() >= 2 and t.numel() <= LARGEST and t.numel() > 0)
    if x is None:
        return unary(b)
    if b.chance(3):
        return void(b.emit("gram", [x]))
    if b.chance(3):
        other = b.pick(lambda t: t.dim() == b[x].dim() and t.shape[:-1] == b[x].shape[:-1] and t.dtype == b[x].dtype)
        return void(b.emit("einsum_outer", [x, other or x])) if b[x].shape[-1] <= 4 else unary(b)
    other = b.pick(
        lambda t: (
            t.dim() >= 2
            and t.dtype == b[x].dtype
            and t.shape[-2] == b[x].shape[-1]
            and t.dim() in (2, b[x].dim())
            and (t.dim() == 2 or t.shape[:-2] == b[x].shape[:-2])
        )
    )
    return unary(b) if other is None else void(b.emit("matmul", [x, other]))


def attention(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() in (3, 4) and 0 < t.numel() <= LARGEST and t.shape[-1] > 1)
    if x is None:
        return shapes(b)
    like = b[x]

    def source() -> str:
        found = b.pick(lambda t: t.shape == like.shape and t.dtype == like.dtype) or x
        if b.chance(2):
            return found
        return b.emit("linear", [found, b.weight((like.shape[-1], like.shape[-1]), x)])[0]

    qkv = [source(), source(), source()]
    kind = b.choose(("sdpa", "attention", "masked_attention", "sdpa_dropout"))
    return void(b.emit(kind, qkv, [b.chance(2)] if kind == "sdpa" else []))


def convolution(b: Builder) -> None:
    kind = b.choose(("conv2d", "conv1d", "depthwise", "conv_transpose", "avg_pool", "max_pool", "adaptive_pool"))
    kind = b.choose((kind, "upsample", "bilinear_upsample")) if b.chance(4) else kind
    dim = 3 if kind == "conv1d" else 4
    grows = kind in ("conv_transpose", "upsample", "bilinear_upsample")
    x = b.pick(lambda t: t.dim() == dim and 0 < t.numel() <= (40 if grows else LARGEST))
    if x is None:
        shape = (2, 3, 5) if dim == 3 else (2, 2, 4, 4)
        x = b.input(shape, role="differentiable" if b.chance(2) else "input")
    channels, out = b[x].shape[1], b.choose((2, 3, b[x].shape[1]))
    if kind == "conv1d":
        weights = [b.weight((out, channels, 3), x)]
    elif kind == "conv2d":
        weights = [b.weight((out, channels, 3, 3), x), b.weight((out,), x)]
    elif kind == "depthwise":
        weights = [b.weight((channels, 1, 3, 3), x)]
    elif kind == "conv_transpose":
        weights = [b.weight((channels, out, 2, 2), x)]
    else:
        weights = []
    b.emit(kind, [x, *weights])


def norm(b: Builder) -> None:
    kind = b.choose(("layer_norm", "batch_norm", "group_norm", "rms_norm", "batch_norm_eval", "instance_norm"))
    if kind in ("layer_norm", "rms_norm"):
        x = b.pick(lambda t: t.dim() > 0 and t.shape[-1] > 1)
        if x is None:
            return unary(b)
        return void(
            b.emit(kind, [x, *(b.weight((b[x].shape[-1],), x) for _ in range(2 if kind == "layer_norm" else 1))])
        )
    least = 3 if kind in ("instance_norm", "group_norm") else 2
    x = b.pick(lambda t: least <= t.dim() <= 4 and t.numel() > t.shape[1] and math.prod(t.shape[2:]) > (least > 2))
    if x is None:
        return unary(b)
    channels = b[x].shape[1]
    if kind == "instance_norm":
        return void(b.emit(kind, [x]))
    affine = [b.weight((channels,), x), b.weight((channels,), x)]
    if kind == "group_norm":
        return void(b.emit(kind, [x, *affine], [2 if channels % 2 == 0 else 1]))
    if kind == "batch_norm" and "checkpoint" in b.regions:
        return void(b.emit("batch_norm_stateless", [x, *affine]))  # running stats would be updated twice, by torch
    dtype = str(b[x].dtype).removeprefix("torch.")
    mean = b.leaf("buffer", (channels,), dtype)
    stats = [mean, b.leaf("buffer", (channels,), dtype, other_than=mean)]  # torch's decomposition takes them for two
    kind = kind if b.checkpointed.isdisjoint(stats) else "batch_norm_eval"
    return void(b.emit(kind, [x, *stats, *affine]))


def reduction(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and t.numel() > 0)
    if x is None:
        return unary(b)
    dim = b.choose(range(-1, b[x].dim() - 1))
    return void(b.emit(b.choose(list(REDUCTIONS)), [x], [dim, b.chance(2)]))


def along(b: Builder) -> None:
    x = b.pick(lambda t: t.dim() > 0 and 0 < t.numel() <= LARGEST)
    if x is None:
        return unary(b)
    return void(b.emit(b.choose(list(ALONG)), [x], [b.choose(range(-1, b[x].dim() - 1))]))


def shapes(b: Builder) -> None:
    """Views and their like."""
    kind = b.choose(list(VIEWS))
    least = {"merge_sizes": 2, "tril": 2, "diagonal": 2, "unsqueeze": 0, "squeeze": 0, "expand": 0, "view_as": 0}.get(
        kind, 1
    )
    grows = kind in ("expand", "repeat", "pad", "unfold")
    x = b.pick(
        lambda t: (
            least <= t.dim() <= 4 - (kind in ("expand", "unsqueeze", "unfold"))
            and 0 < t.numel() <= (LARGEST // 2 if grows else 10**6)
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
    x = b.pick(lambda t: t.numel() <= LARGEST)
    if x is None:
        return unary(b)
    others = [b.pick(lambda t: t.shape == b[x].shape) or x for _ in range(b.choose((1, 2)))]
    if b[x].dim() > 0 and not b.chance(3):
        return void(b.emit("cat", [x, *others], [b.choose(range(-1, b[x].dim() - 1))]))
    return void(b.emit("stack", [x, *others], [0])) if b[x].dim() < 4 else unary(b)


def parts(b: Builder) -> None:
    kind = b.choose(("chunk", "split", "unbind", "topk"))
    x = b.pick(lambda t: t.dim() > 0 and 2 <= t.shape[-1] <= 6)
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
        rows, width = 5, b.choose((2, 3, 4))
        ids = b.input((2, 3), "int64", rows)
        kind = b.choose(("embedding", "embedding_bag", "one_hot"))
        if kind == "one_hot":
            return void(b.emit(kind, [ids, x], [rows]))
        return void(b.emit(kind, [ids, b.leaf("parameter", (rows, width))]))
    x = b.pick(lambda t: 1 <= t.dim() <= 3 and 0 < t.numel() <= LARGEST)
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
    x = b.pick(lambda t: least <= t.dim() <= (2 if kind == "feature_dropout" else 4) and 0 < t.numel() <= LARGEST)
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


def region(b: Builder) -> None:
    """Some instructions in a checkpoint, a loop, or without gradient."""
    x = b.pick(lambda t: t.requires_grad)
    kinds = ["loop", "no_grad", *(["checkpoint"] * 3 if b.with_regions else [])]
    kind = b.choose(kinds)
    if x is None or b.regions:
        return unary(b)
    outer, registers, shape, dtype = b.body, list(b.registers), b[x].shape, b[x].dtype
    carried = f"c{b.count}"
    b.count += 1
    b.body = []
    b.regions.append(kind)
    b.environment[carried] = b[x]
    b.registers.append(Register(carried, len(b.regions) - 1, frozen=True))
    with torch.set_grad_enabled(kind != "no_grad"):
        for _ in range(b.choose(range(1, MAX_BODY + 1))):
            b.choose(INSTRUCTIONS)(b)
        last = b.pick(lambda t: True)
        assert last is not None
        if kind == "loop" and not (last == b.registers[-1].name and b[last].shape == shape and b[last].dtype == dtype):
            last = b.emit("fold", [carried, last])[0]
        elif b.body[-1].out != last:
            last = b.emit("sin", [last])[0]
    attrs = {"loop": [b.choose((2, 3))], "checkpoint": [b.chance(3)], "no_grad": []}[kind]
    name = f"v{b.count}"
    b.count += 1
    op = Op(name, kind, (carried, x), tuple(attrs), tuple(b.body))
    b.regions.pop()
    b.body = [*outer, op]
    b.registers = registers + [
        r for r in b.registers if r.name in {leaf.name for leaf in b.leaves} and r not in registers
    ]
    if kind == "checkpoint":
        b.checkpointed |= {x, *(arg for inner in op.walk() for arg in inner.args if arg in b.environment)}
    b.environment[name] = b[last] if kind != "no_grad" else b[last].detach()
    b.registers.append(Register(name, len(b.regions), frozen=kind == "no_grad"))
    return None


def void(_: object) -> None:
    """Drops a result, so that an instruction can end in a return."""


INSTRUCTIONS: tuple[Callable[[Builder], None], ...] = (
    unary,
    linear,
    binary,
    products,
    shapes,
    reduction,
    along,
    joined,
    parts,
    norm,
    attention,
    convolution,
    in_place,
    in_place,
    random_numbers,
    random_numbers,
    buffers,
    indexing,
    casting,
    detached,
    region,
    region,
)


def _expands_to(small: torch.Tensor, large: torch.Tensor) -> bool:
    return small.dim() <= large.dim() and _broadcast_numel(small, large) == large.numel() and large.numel() > 0


def _broadcast_numel(a: torch.Tensor, b: torch.Tensor) -> int:
    pairs = list(zip(reversed(a.shape), reversed(b.shape), strict=False))
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        return 10**9
    return math.prod(torch.broadcast_shapes(a.shape, b.shape))


@st.composite
def programs(draw: Callable[[st.SearchStrategy[Any]], Any], with_regions: bool = True) -> Program:
    """Programs; without `with_regions` none has a checkpoint, which only Dynamo can trace.

    At least one output depends on a parameter or a differentiable input.
    """
    torch.manual_seed(0)
    dtype = "float64" if draw(st.integers(0, 5)) < 5 else "float32"
    b = Builder(draw, dtype, with_regions)
    shape = b.choose(((2, 3), (2, 3, 4), (4,), (2, 2, 4, 4), (2, 2, 3, 2), (3, 3)))
    b.input(shape, role="input" if b.chance(3) else "differentiable")
    b.emit("mul", [b.registers[0].name, b.weight(shape[-1:], b.registers[0].name)])
    for _ in range(draw(st.integers(1, MAX_OPS))):
        b.choose(INSTRUCTIONS)(b)
    outputs = _outputs(b)
    program = Program(tuple(b.leaves), tuple(b.body), outputs)
    assume(_can_train(program))
    return program


def _can_train(program: Program) -> bool:
    """Whether torch runs its backward: not when something that it reads was changed in place."""
    try:
        weighted_sum(program.function()(*program.tensors())).backward()
    except RuntimeError as error:
        if any(text in str(error) for text in REFUSED):
            return False
        raise
    return True


def _outputs(b: Builder) -> tuple[str, ...]:
    """The newest value with a gradient, and sometimes more: also integers, views, and what needs no gradient."""
    given = {_pointer(b[leaf.name]) for leaf in b.leaves}  # their views are made anew outside of the graph
    differentiable = b.pick(lambda t: t.requires_grad and _pointer(t) not in given)
    if differentiable is None:
        differentiable = b.emit("mul", [b.pick() or "", b.leaf("parameter", (1,))])[0]
    others = [r.name for r in reversed(b.registers) if r.name != differentiable]
    more = [b.choose(others) for _ in range(b.choose((0, 0, 1, 2, 3)))] if others else []
    return tuple(dict.fromkeys([differentiable, *more]))


@st.composite
def trials(draw: Callable[[st.SearchStrategy[Any]], Any], entry: str, compiler: str = "eager") -> Trial:
    """A program with the budgets and forced plans that it is run under; those through Dynamo are few, as each compiles."""
    program = draw(programs(with_regions=entry == "dynamo"))
    many = entry == "graph"
    budgets = draw(st.lists(st.sampled_from(BUDGETS), min_size=1, max_size=3 if many else 1, unique=True))
    masks = draw(st.lists(st.integers(0, 999), min_size=1, max_size=3 if many else 1, unique=True))
    return Trial(program, entry, tuple(budgets), tuple(masks), draw(st.integers(0, 4)) == 4, compiler)
