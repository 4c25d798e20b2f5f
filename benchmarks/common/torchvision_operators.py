"""torchvision's Python code beside a torch for CPUs: its wheel is built for CUDA, and the operators in it do not load there.

transformers and timm import torchvision for their image transforms, and torchvision registers fake kernels for two of its operators
when it is imported.  Declared here, without a kernel, they let it be imported; no stack calls them.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from torch.library import Library

_KEPT: list[Library] = []


def declare_missing_operators() -> None:
    """Import torchvision, the operators that it does not find declared before; nothing where it is not installed."""
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        library = Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        importlib.import_module("torchvision")
