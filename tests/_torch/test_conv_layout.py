"""Graphs whose convolutions get channels-last layout on a GPU, as Inductor decides."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch.codegen_rules import inductor_rules
from compile_remat._torch.conv_layout import convolution_strides, with_layout
from compile_remat._torch.fake import say_device


@pytest.mark.parametrize(
    ("channels", "kernel", "has_layout"), [((3, 128), 8, True), ((256, 128), 3, False), ((4, 8), 3, False)]
)
def test_a_gpus_layout_depends_on_the_forwards_convolutions(
    channels: tuple[int, int], kernel: int, has_layout: bool
) -> None:
    """Patches of an image gain by it, a decoder that halves the channels and small convolutions do not."""
    with FakeTensorMode():
        x, w = torch.empty(1, channels[0], 16, 16), torch.empty(channels[1], channels[0], kernel, kernel)
        graph = make_fx(lambda x, w: (torch.conv2d(x, w), x.relu()))(x, w)
    say_device(graph, torch.device("cuda", 0))
    rules = with_layout(inductor_rules, graph, ())
    assert rules("cuda").has_channels_last == has_layout
    assert GraphLowering.decide_layout_opt(graph, is_inference=False) == has_layout
    assert rules("cpu") == inductor_rules("cpu")
    backward = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default)
    assert not with_layout(inductor_rules, graph, backward)("cuda").has_channels_last


def test_a_slice_of_pixels_keeps_the_distance_of_its_pictures() -> None:
    """The gradient of an image's patches, without that of the token that is put before them."""
    tokens = torch.empty(2, 17, 8)[:, 1:].transpose(1, 2).unflatten(-1, (4, 4))
    assert convolution_strides(tokens) == tokens.stride() == (136, 1, 32, 8)
    assert convolution_strides(torch.empty(2, 8, 4, 4)) == (128, 1, 32, 8)
