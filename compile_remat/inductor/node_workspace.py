"""What a node's kernel takes for itself while it runs, beside inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from compile_remat._torch import conv_layout, joint_graph
from compile_remat.inductor.workspace import CONVOLUTIONS, MEASURED, Dense, workspace_bytes


def node_workspace_bytes(node: fx.Node) -> int:
    """Bytes for a convolution, under the layout that Inductor gives it, or an attention on a CPU; 0 for all else.

    The first question of its kind runs the kernel once, on uninitialised tensors of the node's sizes.
    """
    if node.target not in MEASURED:
        return 0
    values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return 0
    strides = conv_layout.convolution_strides if node.target in CONVOLUTIONS else joint_graph.hint_strides
    return workspace_bytes(node.target, [_plain(v, strides) for v in values], node.kwargs)


def _plain(value: object, strides: Callable[[torch.Tensor], tuple[int, ...]]) -> object:
    if isinstance(value, torch.Tensor):
        return Dense(joint_graph.hint_shape(value), strides(value), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_plain(v, strides) for v in value)
    return joint_graph.hint_int(value) if isinstance(value, torch.SymInt) else value
