"""What a node's kernel takes for itself while it runs, beside inputs and outputs."""

from __future__ import annotations

import torch
from torch import fx

from compile_remat import _torch, _torch_layout
from compile_remat._torch_workspace import MEASURED, Dense, workspace_bytes


def node_workspace_bytes(node: fx.Node) -> int:
    """Bytes for a convolution on a CPU, under the layout that Inductor gives it; 0 for other operators and devices.

    The first question of its kind runs the kernel once, on uninitialised tensors of the node's sizes.
    """
    if node.target not in MEASURED:
        return 0
    values = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return 0
    return workspace_bytes(node.target, [_plain(v) for v in values], node.kwargs)


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Dense(_torch.hint_shape(value), _torch_layout.convolution_strides(value), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return _torch.hint_int(value) if isinstance(value, torch.SymInt) else value
