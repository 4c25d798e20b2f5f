"""A Dynamo graph as it was captured, on the host instead of an accelerator: the reference where memory is short."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import fx

_ACCELERATOR = re.compile(r"^(cuda|xpu|mps|hpu|npu|privateuseone)(:\d+)?$")


def graph_on_host(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph with every device in it replaced by the CPU, its bodies and constants included."""
    moved = fx.GraphModule(module, copy.deepcopy(module.graph))
    for node in moved.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            _replace(moved, node.target)
        node.args = fx.node.map_aggregate(node.args, _on_host)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _on_host)
        if node.op == "call_method" and node.target == "cuda":
            node.target, node.args, node.kwargs = "cpu", node.args[:1], {}
    moved.recompile()
    return moved


def _replace(module: fx.GraphModule, target: str) -> None:
    path, _, name = target.rpartition(".")
    owner: Any = module.get_submodule(path)
    value = getattr(owner, name)
    if isinstance(value, fx.GraphModule):
        setattr(owner, name, graph_on_host(value))
    elif isinstance(value, torch.Tensor):
        setattr(owner, name, _tensor_on_host(value))


def _tensor_on_host(value: torch.Tensor) -> torch.Tensor:
    """A copy even of what is on the host: the graph may write into it."""
    moved = value.detach().to("cpu", copy=True)
    return torch.nn.Parameter(moved, value.requires_grad) if isinstance(value, torch.nn.Parameter) else moved


def _on_host(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("cpu") if argument.type != "meta" else argument
    return "cpu" if isinstance(argument, str) and _ACCELERATOR.match(argument) else argument
