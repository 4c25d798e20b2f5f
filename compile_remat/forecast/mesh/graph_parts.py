"""A model's graph cut into parts: before and behind each block, as under FSDP2, or at the buckets of DDP, as torch does.

A block that is compiled by itself is the part of the whole graph that lies in its module, with the same inputs.  The nodes before,
between and behind blocks are parts as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from compile_remat._torch.ranks.ddp_buckets import buckets_under_ddp
from compile_remat.passes.graph.origins import module_paths


@dataclass(frozen=True)
class Part:
    """A part of a model's graph.

    Attributes:
        block: The path of the block; empty for a part between blocks.
        module: The part's graph.
        inputs: The inputs of the part.
        needs_gradient: True if an output of the part needs a gradient.
    """

    block: str
    module: fx.GraphModule
    inputs: tuple[Any, ...]
    needs_gradient: bool

    def key(self) -> tuple[object, ...]:
        """Returns a key that is equal for parts that compile to the same code: same operators, same sizes, any names."""
        return (*_lines_of(self.module), *map(_text_of, self.inputs))


def parts_of(module: fx.GraphModule, inputs: Sequence[Any], blocks: Sequence[str]) -> list[Part]:
    """Returns the parts of a Dynamo graph in execution order.  Runs the parts on `inputs`, which are fake tensors."""
    return _parts(module, inputs, *_numbered(module.graph, blocks))


def parts_under_ddp(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Part]:
    """Returns the parts of a Dynamo graph under DDP, cut at its buckets; no part is a block."""
    numbers = buckets_under_ddp(module)
    return _parts(module, inputs, numbers, [""] * (1 + max(numbers.values(), default=0)))


def _parts(
    module: fx.GraphModule, inputs: Sequence[Any], numbers: Mapping[fx.Node, int], names: Sequence[str]
) -> list[Part]:
    cut = split_module(module, module, numbers.__getitem__)
    parts: list[Part] = []

    def run(name: str, given: tuple[Any, ...]) -> Any:
        part = getattr(cut, name)
        returned = part(*given)
        values = returned if isinstance(returned, tuple) else (returned,)
        needs_gradient = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
        parts.append(Part(names[int(name.removeprefix("submod_"))], part, given, needs_gradient))
        return tuple(map(_cut_off, values)) if isinstance(returned, tuple) else _cut_off(returned)

    _Runner(cut, run).run(*inputs)
    return parts


class _Runner(fx.Interpreter):
    """Runs the outer graph, and calls a function for each of its parts."""

    def __init__(self, module: fx.GraphModule, run_part: Callable[[str, tuple[Any, ...]], Any]) -> None:
        super().__init__(module)
        self.run_part = run_part

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run_part(target, args)


def _cut_off(value: Any) -> Any:
    """Returns the value as an input of the next part: detached, since no gradient flows between parts here."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _numbered(graph: fx.Graph, blocks: Sequence[str]) -> tuple[dict[fx.Node, int], list[str]]:
    """Returns the number of each node's part, and the block of each part; empty for a part between blocks."""
    numbers: dict[fx.Node, int] = {}
    names: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in numbers:  # an output of a checkpoint
            numbers[node] = numbers[node.args[0]]
            continue
        block = _block_of(node, blocks)
        if not names or names[-1] != block:
            names.append(block)
        numbers[node] = len(names) - 1
    return numbers, names


def _block_of(node: fx.Node, blocks: Sequence[str]) -> str:
    """Returns the block that a node lies in, or the nodes of its own subgraph (a checkpoint's); empty if in none."""
    for path in module_paths(node):
        for block in blocks:
            if path == block or path.startswith(f"{block}."):
                return block
    root = node.graph.owning_module
    for read in node.all_input_nodes:
        body = getattr(root, str(read.target), None) if read.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            inner = (_block_of(n, blocks) for n in body.graph.nodes if n.op in ("call_function", "call_method"))
            if found := next(filter(None, inner), ""):
                return found
    return ""


def _lines_of(module: fx.GraphModule) -> Iterator[object]:
    index = {node: k for k, node in enumerate(module.graph.nodes)}

    for node in module.graph.nodes:
        given = fx.map_arg((node.args, node.kwargs), lambda argument: f"%{index[argument]}")
        if node.op == "get_attr":
            held = getattr(module, str(node.target), None)
            yield tuple(_lines_of(held)) if isinstance(held, fx.GraphModule) else (str(node.target), id(held))
        elif node.op == "placeholder":
            yield node.op
        else:
            yield node.op, str(node.target), str(given), str(_tag_of(node.meta))


def _tag_of(meta: Mapping[str, Any]) -> Any:
    return meta.get("recompute"), meta.get("custom")


def _text_of(given: Any) -> object:
    if not isinstance(given, torch.Tensor):
        return str(given)
    spread = tuple(str(getattr(given, name, "")) for name in ("device_mesh", "placements"))  # of a DTensor
    kind = type(given).__name__, str(given.dtype), tuple(given.shape), tuple(given.stride()), given.requires_grad
    return (*kind, *spread)
