"""Helpers that all builders of models share."""

from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


def scaled(full: int, scale: float, *, step: int = 1, least: int = 1) -> int:
    """`full * scale`, rounded down to a multiple of `step`, at least `least`."""
    return max(least, int(full * scale) // step * step)


DTYPES = ("float32", "bfloat16", "autocast")
"""Types that a model trains in: all of it in one, or in float32 with what autocast makes bfloat16."""


class Autocast(nn.Module):
    """A module whose forward runs under autocast to bfloat16."""

    def __init__(self, inner: nn.Module, device_type: str) -> None:
        super().__init__()
        self.inner, self.device_type = inner, device_type

    def forward(self, *inputs: Tensor) -> Any:
        """The output of the inner module under autocast to bfloat16."""
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.inner(*inputs)


def in_dtype(built: Built, dtype: str) -> Built:
    """The module and its floating-point inputs in one of `DTYPES`."""
    module, inputs = built
    if dtype == "autocast":
        return Autocast(module, inputs[0].device.type), inputs
    if dtype == "bfloat16":
        return module.bfloat16(), tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    return built


def converted(module: nn.Module, dtype: torch.dtype, keep: torch.memory_format = torch.preserve_format) -> None:
    """As ``module.to(dtype, memory_format=keep)`` in place, which does not do for fake tensors; what is tied stays tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and parameter not in replaced:
                replaced[parameter] = nn.Parameter(converted_tensor(parameter.detach(), dtype, keep))
            part._parameters[key] = None if parameter is None else replaced[parameter]
        for key, buffer in part._buffers.items():
            part._buffers[key] = None if buffer is None else converted_tensor(buffer, dtype, keep)


def converted_tensor(tensor: Tensor, dtype: torch.dtype, keep: torch.memory_format = torch.preserve_format) -> Tensor:
    """In `dtype` if it has numbers, and in the memory format if it has four dimensions."""
    keep = keep if tensor.ndim == 4 else torch.preserve_format
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, memory_format=keep)
