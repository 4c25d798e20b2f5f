"""Autograd's side of a gradient that is delivered early: its leaf, `.grad`, and hooks.

Private names, same in 2.11 to 2.15: ``torch._C._current_autograd_node``, ``_will_engine_execute_node``, ``_current_graph_task_id``,
and of a tensor ``_backward_hooks`` and ``_post_accumulate_grad_hooks``.

At the end, the engine visits the ``AccumulateGrad`` of a leaf once more, with an undefined gradient, and calls every hook on the
way with None.  Removing the edge would avoid this, but the parameter would then be no input of the graph to autograd.  So a hook
before the visit sets the leaf's hooks aside, and one behind it puts them back.  Nothing raises between the two, and before and
after the visit all hooks are in their place, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from compile_remat._torch.tensor_arguments import is_plain_tensor

ACCUMULATE = "torch::autograd::AccumulateGrad"


def current_node() -> Any:
    """Returns the autograd node whose backward runs in this thread."""
    return torch._C._current_autograd_node()


def leaf_nodes(node: Any) -> list[Any]:
    """Returns, for each tensor that the graph of `node` takes, the ``AccumulateGrad`` node of its leaf; None if it is no leaf."""
    found = (function for function, _ in node.next_functions)
    return [f if f is not None and f.name() == ACCUMULATE else None for f in found]


def shared_storages(tensors: Iterable[object]) -> set[int]:
    """Returns the ids of the plain tensors that share their storage with another plain tensor among `tensors`."""
    first: dict[tuple[str, int], torch.Tensor] = {}
    shared = set[int]()
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not is_plain_tensor(tensor):
            continue
        other = first.setdefault((str(tensor.device), tensor.untyped_storage().data_ptr()), tensor)
        if other is not tensor:
            shared |= {id(other), id(tensor)}
    return shared


def why_at_the_end(node: Any, gradient: torch.Tensor) -> str:
    """Returns the reason why the backward must return the gradient of a leaf at its end; empty if it may leave now.

    Args:
        node: The ``AccumulateGrad`` node of the leaf.
    """
    leaf = node.variable
    if not _will_run(node):
        return "torch.autograd.grad or backward(inputs=...) asks for other gradients"
    if not is_plain_tensor(leaf) or not leaf.requires_grad:
        return "a parameter is a tensor subclass, or needs no gradient any more"
    if (gradient.dtype, gradient.device, gradient.shape) != (leaf.dtype, leaf.device, leaf.shape):
        return "a gradient has another dtype, device or shape than its parameter"
    if leaf.grad is not None and not (is_plain_tensor(leaf.grad) and leaf.grad.dtype == leaf.dtype):
        return "a .grad is no plain tensor, or has another dtype than its parameter"
    if leaf._backward_hooks:
        return "a parameter has hooks of Tensor.register_hook or register_multi_grad_hook"
    if _has_hooks(node):
        return "the AccumulateGrad node of a parameter has hooks"
    return ""


def _will_run(node: Any) -> bool:
    """Returns whether the engine visits a node in this backward; torch raises for an input of ``torch.autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def _has_hooks(node: Any) -> bool:
    """Returns whether Python code has hooks on the node: a temporary hook shows the number of hooks beside it."""
    handles = [node.register_prehook(_nothing), node.register_hook(_nothing)]
    found = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


def _nothing(*_: object) -> None:
    return None


def set_hooks_aside(node: Any, complain: Callable[[torch.Tensor], None]) -> None:
    """Keep the leaf's hooks from running again when the engine visits the node at the end of this backward.

    Args:
        node: The ``AccumulateGrad`` node of a leaf whose gradient has been delivered in this backward.
        complain: Called with the leaf if another part of the backward contributes to its gradient too.
    """
    leaf, task, aside = node.variable, torch._C._current_graph_task_id(), dict[Any, Any]()
    handles: list[Any] = []

    def done() -> None:
        for handle in handles:
            handle.remove()

    def before(gradients: tuple[Any, ...]) -> None:
        if torch._C._current_graph_task_id() != task:  # the backward of the delivery ended early
            done()
        elif gradients[0] is not None:
            done()
            complain(leaf)
        elif leaf._post_accumulate_grad_hooks:
            aside.update(leaf._post_accumulate_grad_hooks)
            leaf._post_accumulate_grad_hooks.clear()

    def after(*_: object) -> None:
        if aside:
            leaf._post_accumulate_grad_hooks.update(aside)
        done()

    handles += [node.register_prehook(before), node.register_hook(after)]


def owns_its_memory(gradient: torch.Tensor) -> bool:
    """Returns whether a tensor fills its storage: it is no view of a part of another tensor, and not expanded."""
    return gradient.untyped_storage().nbytes() == gradient.nbytes


def accumulate(leaf: torch.Tensor, gradient: torch.Tensor, *, is_owned: bool) -> bool:
    """Add a gradient to `.grad` as autograd does, and return whether the gradient was copied.

    Args:
        is_owned: True if `gradient` itself may become `.grad`.
    """
    with torch.no_grad():
        if leaf.grad is not None:
            leaf.grad.add_(gradient)
            return False
        if is_owned and gradient.stride() == _strides_of_grad(leaf):
            leaf.grad = gradient
            return False
        leaf.grad = torch.empty_strided(leaf.shape, _strides_of_grad(leaf), dtype=leaf.dtype, device=leaf.device).copy_(
            gradient
        )
        return True


def _strides_of_grad(leaf: torch.Tensor) -> tuple[int, ...]:
    """Strides that autograd gives to `.grad`: those of the leaf if it is dense and non-overlapping."""
    return torch.empty_like(leaf, device="meta").stride()


def run_accumulated_hooks(leaf: torch.Tensor) -> None:
    """Run the hooks of ``register_post_accumulate_grad_hook``, in the order in which they were registered.

    Raises:
        RuntimeError: A hook returned a value other than None; autograd raises the same error.
    """
    for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
        if hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
