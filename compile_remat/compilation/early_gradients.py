"""Decides before compilation if the gradients of a graph may leave its backward early.

The rewrite is `passes.graph.rewrites.early_gradients`, whose docstring names the other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_remat._torch.tensor_arguments import is_cut_by_torch, is_wrapper_subclass
from compile_remat.config import RematConfig
from compile_remat.inductor.inductor_options import inductor_option
from compile_remat.ranks.wrappers import is_wrapped

OFF = "gradients = early is off for this graph: "
"""Text of a warning and a report before the reason."""


def leaf_positions(example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the arguments that are leaves of autograd and need a gradient."""
    tensors = ((k, x) for k, x in enumerate(example_inputs) if isinstance(x, torch.Tensor))
    return tuple(k for k, x in tensors if x.is_leaf and x.requires_grad)


def why_off(config: RematConfig, example_inputs: Sequence[Any], patches: Mapping[str, Any]) -> str:
    """The reason why gradients stay until the end of the backward although `gradients` is `early`; empty if there is none."""
    if config.gradients == "end":
        return ""
    if is_wrapped() or is_cut_by_torch():
        return OFF + "the model is under DDP or FSDP2, which reduce gradients by hooks of their own"
    if any(map(is_wrapper_subclass, example_inputs)):
        return OFF + "it takes tensor subclasses"
    if config.compiler != "inductor":
        return ""
    if inductor_option("triton.cudagraphs", patches):
        return OFF + "a replayed CUDA graph would skip the hooks of the parameters"
    if inductor_option("cpp_wrapper", patches):
        return OFF + "cpp_wrapper is on"
    return ""
