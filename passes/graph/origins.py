"""Origins: the module, source line and checkpointed region of the user's program that a node comes from."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from compile_remat._torch import joint_graph, sizes
from compile_remat.passes.problem.problem import Origin

NO_REGIONS: Mapping[int | None, int] = MappingProxyType({})

TEXTS = 4096
"""Cache size for parsed paths and stack traces: nodes of one layer share them, and so do the problems of one graph."""

_COMPILED_MODULE = re.compile(r"L\['\w+'\](\[\d+\])?(?=\.)")

_SOURCE_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def numbers_of_regions(graph: fx.Graph) -> dict[int | None, int]:
    """Number of each checkpointed region of a graph, from 1 in the graph's order."""
    regions = dict.fromkeys(joint_graph.region_of(node) for node in graph.nodes)
    return {region: k for k, region in enumerate((r for r in regions if r is not None), start=1)}


def origin_of(node: fx.Node, regions: Mapping[int | None, int] = NO_REGIONS) -> Origin:
    """The `Origin` of a node in the user's program; `regions` numbers the checkpointed regions."""
    value = node.meta.get("val")
    shape: tuple[int, ...] = ()
    dtype = ""
    if isinstance(value, torch.Tensor):
        shape, dtype = sizes.hint_shape(value), str(value.dtype).removeprefix("torch.")
    paths = module_paths(node)
    line = _last_line(node.meta.get("stack_trace") or "")
    return Origin(shape, dtype, paths[-1] if paths else "", line, regions.get(joint_graph.region_of(node), 0))


def module_paths(node: fx.Node) -> list[str]:
    """The modules that a node lies in, the outermost first, as the user names them: ``["blocks.0", "blocks.0.up"]``.

    A compiled module is itself no entry of Dynamo's stack, and its paths begin with what its forward calls it (``L['self']``,
    ``L['args'][0]``): that beginning is left out.  A function's argument is an entry, and stays: ``generator.blocks.0``.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values()]
    compiled = _COMPILED_MODULE.match(paths[0]) if paths else None
    return [plain_path(path.removeprefix(compiled[0]) if compiled else path) for path in paths]


@functools.lru_cache(maxsize=TEXTS)
def _last_line(stack_trace: str) -> str:
    """File and line of a stack trace's last entry."""
    lines = _SOURCE_LINE.findall(stack_trace)
    return f"{lines[-1][0]}:{lines[-1][1]}" if lines else ""


@functools.lru_cache(maxsize=TEXTS)
def plain_path(path: str) -> str:
    """Turns Dynamo's path into the user's: ``L['self']._modules['0'].attn._parameters['weight']`` gives ``0.attn.weight``."""
    path = re.sub(r"^L\['(fn|self)'\]|^L__self__|^[LG](?=\[)", "", path)
    names = r"\._(?:modules|parameters|buffers)\['([^']*)'\]|\['([^']*)'\]"
    path = re.sub(names, lambda m: "." + (m.group(1) or m.group(2) or ""), path)
    return path.strip("._")
