"""Inductor's layout of convolutions: channels_last wherever the tensors are on a CPU (``GraphLowering.decide_layout_opt``).

Imports nothing of ours but `_torch`.  What a convolution reads and writes then has its channels innermost.  Values of the graph
are made that way; inputs of the graph, such as weights, are copied at the start of the forward, and where the backward
reads them it gets the copies.  Elsewhere the answer hangs on a count of arithmetic, and no copies are foreseen.
"""

from __future__ import annotations

import torch

from compile_remat._torch import joint_graph


def is_copied(value: object) -> bool:
    """Whether Inductor copies this (fake) input of a convolution into another order of its dimensions."""
    if not isinstance(value, torch.Tensor) or not is_channels_last(value):
        return False
    return _order(value, joint_graph.hint_strides(value)) != _order(value, convolution_strides(value))


def is_channels_last(value: object) -> bool:
    """Whether Inductor gives this tensor, which a convolution reads or writes, channels that are innermost."""
    from torch._inductor import config

    has_onednn = torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return False
    return bool(has_onednn) and bool(config.layout_optimization)


def convolution_strides(value: torch.Tensor) -> tuple[int, ...]:
    """Strides, in elements, under which a convolution gets or makes this tensor; a slice of channels keeps their distance."""
    strides = joint_graph.hint_strides(value)
    if not is_channels_last(value):
        return strides
    _, channels, height, width = joint_graph.hint_shape(value)
    if strides[1:] == (height * width, width, 1):
        channels = max(channels, strides[0] // (height * width))
    return channels * height * width, 1, width * channels, channels


def _order(value: torch.Tensor, strides: tuple[int, ...]) -> list[int]:
    """The dimensions from the outermost to the innermost; those of size 1 lie nowhere."""
    shape = joint_graph.hint_shape(value)
    return sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
