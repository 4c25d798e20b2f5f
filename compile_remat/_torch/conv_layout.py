"""Inductor's layout of convolutions: channels_last where `InductorRules.has_channels_last` says so, which is on CPUs.

Imports nothing of ours but its siblings.  What a convolution reads and writes then has its channels innermost.  Values of the
graph are made that way; inputs of the graph, such as weights, are copied at the start of the forward, and where the backward
reads them it gets the copies.
"""

from __future__ import annotations

import torch

from compile_remat._torch import sizes
from compile_remat._torch.codegen_rules import RulesOf, inductor_rules


def is_copied(value: object, rules: RulesOf = inductor_rules) -> bool:
    """Whether Inductor copies this (fake) input of a convolution into another order of its dimensions."""
    if not isinstance(value, torch.Tensor) or not is_channels_last(value, rules):
        return False
    return _order(value, sizes.hint_strides(value)) != _order(value, convolution_strides(value, rules))


def is_channels_last(value: object, rules: RulesOf = inductor_rules) -> bool:
    """Whether Inductor gives this tensor, which a convolution reads or writes, channels that are innermost."""
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return rules(value.device.type).has_channels_last


def convolution_strides(value: torch.Tensor, rules: RulesOf = inductor_rules) -> tuple[int, ...]:
    """Strides, in elements, under which a convolution gets or makes this tensor; a slice of channels keeps their distance."""
    strides = sizes.hint_strides(value)
    if not is_channels_last(value, rules):
        return strides
    _, channels, height, width = sizes.hint_shape(value)
    if strides[1:] == (height * width, width, 1):
        channels = max(channels, strides[0] // (height * width))
    return channels * height * width, 1, width * channels, channels


def _order(value: torch.Tensor, strides: tuple[int, ...]) -> list[int]:
    """The dimensions from the outermost to the innermost; those of size 1 lie nowhere."""
    shape = sizes.hint_shape(value)
    return sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
