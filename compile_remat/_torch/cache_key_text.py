"""The key of a compilation in torch's caches, as text.  Private names of torch, same in 2.11, 2.13 and 2.15.

Imports nothing of compile_remat.  On a hit of the AOTAutograd cache none of its code runs, and torch does not hand out its own
key, so `compilation_text` repeats all that a joint graph depends on.  The text must be no finer than torch's key, or an entry
stored under it would be missed on a hit.  Placeholder names are therefore left out: torch 2.13 leaves them out of its key too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_DEVICE_NUMBER = re.compile(r"\b(cuda|xpu|hpu|mps|privateuseone)(:|', index=)\d+")
_TAGS = ("recompute", "custom", "memory_budget")
"""Keys of ``node.meta`` that a user's annotations set and that the partitioner obeys."""


def inductor_cache_folder() -> str:
    """Returns the folder in which Inductor and AOTAutograd cache compiled code (``TORCHINDUCTOR_CACHE_DIR``)."""
    return str(cache_dir())


def partitions_are_cached(options: Mapping[str, Any]) -> bool:
    """Returns whether a compilation with these Inductor options may find its partition in AOTAutograd's cache."""
    disabled = options.get("force_disable_caches", inductor_config.force_disable_caches)
    return bool(functorch_config.enable_autograd_cache) and not disabled


def partition_is_stored() -> bool:
    """Returns whether torch stores the current partition in its local or remote cache.  Call it from the partitioner."""
    is_remote = bool(functorch_config.enable_remote_autograd_cache) and not inductor_config.force_disable_caches
    return partitions_are_cached({}) or is_remote


def compilation_text(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Returns a Dynamo graph, its inputs and torch's settings as text, equal in processes where torch compiles the same."""
    lines = [torch.__version__, *graph_lines(gm), *(_input_text(node, x) for node, x in _inputs(gm, example_inputs))]
    return "\n".join([*lines, *_state_lines()])


def graph_lines(gm: fx.GraphModule) -> Iterator[str]:
    """Yields the text of a graph and of the graphs inside it, one line per node, without node names and addresses."""
    for name, module in gm.named_modules():
        yield f"module {name} {type(module).__qualname__ if not isinstance(module, fx.GraphModule) else ''}"
        if isinstance(module, fx.GraphModule):
            yield _plain(module.meta.get("_checkpoint_context_fn"))
            index = {node: f"%{i}" for i, node in enumerate(module.graph.nodes)}
            yield from (_node_text(node, index) for node in module.graph.nodes)


def _node_text(node: fx.Node, index: Mapping[fx.Node, str]) -> str:
    arguments = fx.map_arg((node.args, node.kwargs), lambda n: index[n])
    target = "" if node.op in ("placeholder", "output") else _plain(node.target)
    module = getattr(node.target, "__module__", "") if callable(node.target) else ""
    tags = [f"{key}={_plain(node.meta[key])}" for key in _TAGS if key in node.meta]
    return " ".join([node.op, f"{module}.{target}", _plain(arguments), *tags])


def _inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of the value that Dynamo traced an input as, whose sizes may be symbols, and the example input."""
    traced = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    return zip([*traced, *[None] * len(example_inputs)], example_inputs, strict=False)


def _input_text(traced: Any, given: Any) -> str:
    shown = given if traced is None else traced
    if not isinstance(shown, torch.Tensor):
        return f"input {type(shown).__qualname__} {_plain(shown)}"
    strides = tuple(shown.stride()) if shown.layout is torch.strided else ""
    facts = (tuple(shown.shape), strides, shown.dtype, shown.device, shown.layout, shown.requires_grad)
    is_parameter = isinstance(given, torch.nn.Parameter)
    return f"input {type(given).__qualname__} {is_parameter} {' '.join(map(str, facts))}"


def _state_lines() -> Iterator[str]:
    """Settings of torch, outside the graph, that AOTAutograd and Inductor's joint passes depend on, as lines of text."""
    for config in (inductor_config, functorch_config):
        yield from (f"{name}={_plain(value)}" for name, value in sorted(config.save_config_portable().items()))
    yield f"grad={torch.is_grad_enabled()} dtype={torch.get_default_dtype()}"
    yield f"deterministic={torch.are_deterministic_algorithms_enabled()}"
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            yield f"autocast {kind} {torch.get_autocast_dtype(kind)}"


def _plain(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def shared_lines(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[str]:
    """Yields a Dynamo graph and its inputs as text, equal on ranks that run the same program, each on its own device."""
    lines = itertools.chain(graph_lines(gm), (_input_text(node, x) for node, x in _inputs(gm, example_inputs)))
    return (_DEVICE_NUMBER.sub(r"\1", line) for line in lines)
