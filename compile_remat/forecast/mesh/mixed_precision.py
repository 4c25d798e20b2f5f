"""A model as FSDP2 runs it under a `MixedPrecisionPolicy`: gathered parameters and inputs get another dtype, buffers keep theirs.

Follows ``FSDPState._cast_forward_inputs`` and ``FSDPParam.init_dtype_attrs`` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compile_remat._torch.operators import tree_leaves, tree_map_only


def in_dtype(model: nn.Module, inputs: Sequence[Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """Cast the floating-point parameters of a model of fake tensors to `dtype`, in place.

    Returns:
        The inputs in that dtype, and the bytes of the inputs that had to be copied.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in made:
                    cast = parameter.detach().to(dtype)
                    made[id(parameter)] = nn.Parameter(cast, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
    given = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tuple(inputs))
    pairs = zip(tree_leaves(inputs), tree_leaves(given), strict=True)
    return given, sum(cast.nbytes for t, cast in pairs if cast is not t)
