"""Settings scoped to the compilation of one graph, beside fusions and the order of kernels."""

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch.fake import say_device
from compile_remat.inductor.plan_guard import guarded


@pytest.mark.parametrize(("channels_in", "is_optimized"), [(128, False), (64, True)])
def test_a_backward_has_the_forwards_layout_of_convolutions(channels_in: int, is_optimized: bool) -> None:
    """Inductor would ask the backward by the convolutions that run there again: on GPUs one of 128 to 64 channels decides."""
    with FakeTensorMode():
        x, narrow, square = (
            torch.empty(*shape) for shape in ((1, channels_in, 8, 8), (64, channels_in, 3, 3), (128, 64, 3, 3))
        )
        forward = make_fx(lambda *args: torch.conv2d(torch.conv2d(args[0], args[1]), args[2]))(x, narrow, square)
    say_device(forward, torch.device("cuda", 0))
    seen: list[bool] = []

    def compiler(gm: fx.GraphModule, example_inputs: object, **options: Any) -> None:
        seen.append(config.layout_optimization)

    compile_graph = guarded(compiler)
    compile_graph(forward, [])
    compile_graph(fx.GraphModule(nn.Module(), fx.Graph()), [], is_backward=True)
    assert seen == [True, is_optimized]
