"""Modules have the names that the user gave them, however a forward calls its own module."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from compile_remat.passes.graph.origins import module_paths


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(this.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(s, x: torch.Tensor) -> torch.Tensor:
        return s.blocks[0](x)


def forwarded(*args: Any, **kwargs: Any) -> torch.Tensor:
    return Model.forward(*args, **kwargs)


class Wrapped(Model):
    forward = functools.wraps(Model.forward)(forwarded)  # as transformers decorates forwards


def of_generator(generator: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return generator(x)


def paths_of(function: Callable[..., Any], *arguments: Any) -> list[list[str]]:
    """The paths of each operator, as Dynamo's graph has them."""
    found: list[list[str]] = []

    def keep(graph: fx.GraphModule, _: Any) -> fx.GraphModule:
        found.extend(module_paths(node) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*arguments, torch.randn(2, 4))
    return found


@pytest.mark.parametrize("model", [Model(), Wrapped(), nn.Sequential(Model())], ids=["s", "args", "self"])
def test_the_compiled_module_is_no_part_of_a_path(model: nn.Module) -> None:
    block = "0.blocks.0" if isinstance(model, nn.Sequential) else "blocks.0"
    linear, relu = paths_of(model)
    assert linear[-2:] == [block, f"{block}.up"] and relu[-1] == block


def test_a_module_that_a_function_gets_keeps_its_name() -> None:
    linear, _ = paths_of(of_generator, Model())
    assert linear == ["generator", "generator.blocks.0", "generator.blocks.0.up"]
