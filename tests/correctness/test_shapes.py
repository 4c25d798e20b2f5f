"""Shapes: sizes that change or that only the data knows, sizes used as numbers, empty tensors; no guard of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compile_remat.backend import remat
from tests.correctness.harness import Case, Observed, Wrap, check, plain_eager, train, weighted_sum, without_caches

dynamo = torch._dynamo.config


def train_over(module: nn.Module, batches: Sequence[Sequence[Any]], wrap: Wrap) -> Observed:
    """One step on each batch through one compiled module, so that it recompiles or generalises between them."""
    compiled = wrap(module)
    seen: dict[str, Any] = {}
    for k, inputs in enumerate(batches):
        seen |= {f"batch {k} {name}": v for name, v in train(module, inputs, lambda _: compiled, steps=1).items()}
    return seen


# -- sizes that change ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A causal transformer block over [B, S, 8] with learned positions: its shapes come from `x.shape`."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        x = x + self.positions(torch.arange(s))
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d))
        return torch.cat([torch.sin(x[:, : s // 2]), F.gelu(x[:, s // 2 :])], dim=1)


SIZES = ((2, 8), (3, 8), (4, 12), (2, 16), (5, 6))


def batches_of(sizes: Sequence[tuple[int, int]], width: int = 8) -> list[list[torch.Tensor]]:
    return [[torch.randn(b, s, width, requires_grad=True)] for b, s in sizes]


def sizes_found_dynamic(wrap: Wrap) -> Observed:
    return train_over(Block(), batches_of(SIZES), wrap)


def sizes_dynamic_at_once(wrap: Wrap) -> Observed:
    with dynamo.patch(assume_static_by_default=False):
        return train_over(Block(), batches_of(SIZES), wrap)


class SizesAsNumbers(nn.Module):
    """Sizes multiply, divide and offset; the derivative needs them, as ints and as floats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        b, s, d = x.shape
        h = torch.sin(self.layer(x)) * b / math.sqrt(s * d)
        h = torch.sin(h * (s / 3 + 0.5)) + torch.cos(h) * max(b, s)
        h = torch.sin(F.pad(h, (0, 0, s // 2, b)) / max(b, s)) * (1.0 if b > 100 else 2.0)
        return h, 2 * b + s, torch.full((b,), float(s)) * torch.sin(h.mean())


def sizes_as_numbers(wrap: Wrap) -> Observed:
    with dynamo.patch(assume_static_by_default=False):
        return train_over(SizesAsNumbers(), batches_of(SIZES), wrap)


class SizeDecides(nn.Module):
    """A symbolic bool in the graph: which branch runs depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] >= 2)
        h = torch.sin(self.layer(x))
        h = torch.cond(x.shape[0] * 2 > x.shape[1], lambda h: torch.sin(h) * 2, lambda h: torch.exp(h), (h,))
        return h * torch.tanh(h)


def size_decides(wrap: Wrap) -> Observed:
    with dynamo.patch(assume_static_by_default=False):
        return train_over(SizeDecides(), batches_of(((2, 8), (6, 3), (3, 9), (9, 3))), wrap)


class PythonNumbers(nn.Module):
    """Python numbers come in; floats that change become symbolic ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float, shift: int, flag: bool) -> torch.Tensor:
        h = torch.sin(self.layer(x) * scale) + shift
        h = torch.sin(h * scale) * shift if flag else torch.cos(h)
        return h * math.sqrt(scale)


def python_numbers(wrap: Wrap) -> Observed:
    numbers = ((0.5, 2, True), (0.7, 3, True), (0.9, 5, False), (1.5, 7, True))
    return train_over(PythonNumbers(), [[torch.randn(6, 8), *n] for n in numbers], wrap)


# -- sizes that only the data knows -----------------------------------------------------------------------------------


class Selected(nn.Module):
    """Rows by a mask, elements by `nonzero`, repeats by a tensor: sizes without a hint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(self.layer(x))
        rows = torch.sin(self.second(h[x[:, 0] > 0]))
        where = torch.nonzero(x[:, 1] > 0)[:, 0]
        picked = torch.cos(h.index_select(0, where)) * where.shape[0]
        chosen = torch.masked_select(h, x > 0.5).exp()
        return rows, picked, chosen, torch.tanh(torch.repeat_interleave(h, counts, dim=0)) ** 2


def selected(wrap: Wrap) -> Observed:
    with dynamo.patch(capture_dynamic_output_shape_ops=True):
        batches = [[torch.randn(12, 8), torch.randint(0, 4, (12,))] for _ in range(2)]
        return train_over(Selected(), batches, wrap)


class Items(nn.Module):
    """Numbers read out of tensors, as a factor, as a size, and as a bound of a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sin(self.layer(x))
        factor = torch.sin(h.detach()).amax().item()
        h = torch.sin(h * factor) * (factor + 1)
        longest = lengths.max().item()
        torch._check(longest >= 2)
        torch._check(longest <= x.shape[0])
        mask = torch.arange(longest)[None, :] < lengths[:, None]
        cut = torch.sin(h[:longest]) * longest
        return cut, torch.where(mask[:, :, None], torch.sin(cut[None]), 0.0), torch.zeros(longest, 8) + h.mean()


def items(wrap: Wrap) -> Observed:
    with dynamo.patch(capture_scalar_outputs=True):
        lengths = (torch.tensor([3, 5, 2]), torch.tensor([4, 7, 6]))
        return train_over(Items(), [[torch.randn(12, 8), n] for n in lengths], wrap)


class RandomItem(nn.Module):
    """The backward needs numbers that were read out of random tensors, and nothing else of these.

    Through `full` the factor stays a symbolic float, which cannot be saved; a plain factor becomes a tensor again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = torch.rand(16).mean().item()
        count = (torch.rand(16) < 0.5).sum().item()
        return torch.sin(torch.sin(self.layer(x)) * torch.full((8,), factor)) * count


def random_item(wrap: Wrap) -> Observed:
    with dynamo.patch(capture_scalar_outputs=True):
        return train(RandomItem(), [torch.randn(12, 8)], wrap)


# -- sizes at the edge ------------------------------------------------------------------------------------------------


class Edges(nn.Module):
    """Linear, attention, concatenation and reductions over dimensions that may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.qkv, self.norm = nn.Linear(8, 8), nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.sin(self.norm(torch.sin(self.layer(x))))
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = torch.cat([h, F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)], dim=-1)
        return F.softmax(h, -1) * torch.exp(h), h.sum(0)


def empty_batch(wrap: Wrap) -> Observed:
    return train(Edges(), [torch.randn(0, 5, 8, requires_grad=True)], wrap)


def sizes_down_to_none(wrap: Wrap) -> Observed:
    with dynamo.patch(assume_static_by_default=False):
        return train_over(Edges(), batches_of(((3, 4), (1, 4), (0, 4), (2, 1), (4, 0))), wrap)


EAGER = ("eager",)

CASES = [
    Case("sizes_found_dynamic", sizes_found_dynamic),
    Case("sizes_dynamic_at_once", sizes_dynamic_at_once, compilers=EAGER),
    Case("sizes_as_numbers", sizes_as_numbers, rtol=1e-5, atol=1e-4),
    Case("size_decides", size_decides, compilers=EAGER),
    Case("python_numbers", python_numbers),
    Case("selected", selected),
    Case("items", items, rtol=1e-5, atol=1e-4),
    Case("random_item", random_item, reference="compiled"),
    Case("empty_batch", empty_batch),
    Case("sizes_down_to_none", sizes_down_to_none, compilers=EAGER),
]


def test_shapes(case: Case, compiler: str, budgets: Sequence[float | str]) -> None:
    check(case, compiler, budgets)


# -- recompiles -------------------------------------------------------------------------------------------------------


def guards_of(function: Callable[..., Any]) -> list[list[str]]:
    """The conditions under which each compiled variant of a function is used again, but for identities of objects."""
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function)
    return [sorted(p for p in entry.guard_manager.code_parts if "___check_obj_id" not in p) for entry in entries]


def compiled_variants(module: nn.Module, batches: Sequence[Any], wrap: Wrap) -> tuple[int, list[list[str]]]:
    """The number of graphs that Dynamo hands to the backend over the batches, and the guards of each."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = wrap(module)
    with without_caches():
        for inputs in batches:
            weighted_sum(compiled(*inputs)).backward()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], guards_of(module.forward)


CHANGING: dict[str, tuple[bool | None, Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "found": (None, Block, lambda: batches_of(((2, 8), (3, 8), (4, 12), (1, 4)))),
    "numbers": (True, SizesAsNumbers, lambda: batches_of(((2, 8), (8, 3), (120, 2), (4096, 1)))),
    "edges": (True, Edges, lambda: batches_of(((3, 4), (1, 4), (0, 4), (5, 9)))),
    "branch": (True, SizeDecides, lambda: batches_of(((2, 8), (6, 3), (3, 9), (9, 3)))),
    "python_numbers": (
        None,
        PythonNumbers,
        lambda: [(torch.randn(n + 3, 8), 0.5 + n, n % 4, n % 3 > 0) for n in range(6)],
    ),
}


@pytest.mark.parametrize(
    "name",
    ["branch", "python_numbers", *(pytest.param(n, marks=pytest.mark.full) for n in ("found", "numbers", "edges"))],
)
def test_planning_adds_no_guard(name: str) -> None:
    """A size that our planner compared would be one more condition, and one more recompile."""
    dynamic, build, batches = CHANGING[name]
    module, inputs = build(), batches()
    expected = compiled_variants(module, inputs, lambda m: torch.compile(m, backend=plain_eager(), dynamic=dynamic))
    assert expected[0] > 0 and len(expected[1]) > 0
    for budget in ("max", "min"):
        options: dict[str, Any] = {"memory_budget": budget, "compiler": "eager"}
        actual = compiled_variants(
            module, inputs, lambda m, o=options: torch.compile(m, backend=remat, options=o, dynamic=dynamic)
        )
        assert actual == expected, f"memory_budget {budget}"
