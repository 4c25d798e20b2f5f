"""A compiled graph's autograd node: found from the outputs of a call, and its backward intercepted.

Private names of torch, same in 2.11, 2.13 and 2.15.  AOTAutograd makes one `torch.autograd.Function` class for each graph
that it compiles.  Attributes are set on that class alone, so other graphs and other backends are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Backward = Callable[..., Any]

SEARCH_LIMIT = 10_000
"""Most nodes that a search visits: only a few views lie between an output and its graph's node."""


def sequence_number() -> int:
    """Returns the sequence number that this thread's next autograd node gets."""
    return int(torch._C._autograd._get_sequence_nr())


def compiled_node(outputs: Iterable[object], since: int) -> Any | None:
    """Returns the autograd node of the compiled graph that made `outputs`; None if no output leads to such a node.

    Args:
        since: `sequence_number` before the call; nodes with a lower number belong to other graphs.
    """
    stack = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set[Any]()
    while stack and len(seen) < SEARCH_LIMIT:
        node = stack.pop()
        if node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        if hasattr(getattr(type(node), "_forward_cls", None), "compiled_fw"):
            return node
        stack.extend(n for n, _ in node.next_functions if n is not None)
    return None


def edges_of(outputs: Iterable[object]) -> list[GradientEdge]:
    """Returns what keeps the autograd nodes of outputs, and what these have saved, alive without the outputs.

    A reference to the node itself does not on torch 2.11.
    """
    return [get_gradient_edge(t) for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]


def can_be_differentiated(args: Sequence[Any]) -> bool:
    """Returns whether a call with these arguments saves tensors for a backward."""
    return torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def intercept_backward(node: Any, handle: Callable[[Any, Backward, tuple[Any, ...]], Any]) -> None:
    """Replace the backward of `node` by ``handle(node, original, arguments)``; the node keeps `handle` alive.

    The class of the node calls each node's own handle.  A hook of the node would be simpler, but autograd keeps the gradients of
    the outputs alive until the hooks of a node have run, whereas the compiled backward frees these gradients after their last use.
    """
    owner = type(node)._forward_cls
    if "remat_original" not in vars(owner):
        owner.remat_original = original = owner.backward
        owner.backward = staticmethod(lambda ctx, *args: _handled(ctx, original, args))
    node.remat_handle = handle


def _handled(node: Any, original: Backward, arguments: tuple[Any, ...]) -> Any:
    handle = getattr(node, "remat_handle", None)
    return original(node, *arguments) if handle is None else handle(node, original, arguments)


def says_changed(error: RuntimeError) -> bool:
    """Returns whether autograd refuses a backward because a saved tensor has another version than when it was saved."""
    return "has been modified by an inplace operation" in str(error)


def keeps_its_graph() -> bool:
    """Returns whether the backward that runs in this thread was called with ``retain_graph``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def runs_in_backward() -> bool:
    """Returns whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def written_inputs(num_inputs: int) -> frozenset[int] | None:
    """Positions of the inputs whose data or metadata the graph just compiled mutates; None if torch does not list each input."""
    from torch._guards import TracingContext

    return _written(getattr(TracingContext.try_get(), "fw_metadata", None), num_inputs)


def written_by(node: Any, num_inputs: int) -> frozenset[int] | None:
    """Returns the same as `written_inputs` for the graph of an autograd node."""
    return _written(getattr(type(node)._forward_cls, "metadata", None), num_inputs)


def _written(metadata: Any, num_inputs: int) -> frozenset[int] | None:
    infos = getattr(metadata, "input_info", None)
    if infos is None or len(infos) != num_inputs:
        return None
    return frozenset(k for k, info in enumerate(infos) if info.mutates_data or info.mutates_metadata)


def keeping_version(tensor: torch.Tensor) -> Any:
    """Returns a context in which writes into `tensor` do not increase its version counter."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensor)
