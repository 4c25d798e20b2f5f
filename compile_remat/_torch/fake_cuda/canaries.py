"""Checks that the fake device is in force: for answers that would be wrong without an error, in a process that installed it."""

from __future__ import annotations

from typing import Any


def problem() -> str:
    """Returns one line about the first wrong answer; empty if all are right."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._triton import has_triton

    if not torch.cuda.is_available() or not torch._C._cuda_getCurrentRawStream(0) == 0:
        return "torch does not accept the fake device"
    if not has_triton():
        return "torch finds no Triton for the fake device"
    with FakeTensorMode(), torch.device("cuda"):
        if type(torch.tensor(2.0)).__name__ != "FakeTensor":
            return "a tensor of numbers is made on the device for real"
        for groups in (1, 16):
            backend, keeps_layout, place = convolution(torch.float32, groups)
            if backend not in ("Cudnn", "CudaDepthwise2d") or place != "cuda:0":
                return f"a convolution in {groups} groups runs as {backend} on {place}, not by cuDNN"
            if backend == "Cudnn" and not keeps_layout:
                return "convolutions by cuDNN do not keep channels last"
    return ""


def convolution(dtype: Any, groups: int) -> tuple[str, bool, str]:
    """Returns a 16-channel convolution's backend, True if its output is channels-last, and its gradient's device.

    Call it under a ``FakeTensorMode`` and ``torch.device("cuda")``.
    """
    import torch

    x = torch.empty(2, 16, 8, 8, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    w = torch.empty(16, 16 // groups, 3, 3, dtype=dtype, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, padding=1, groups=groups)
    y.sum().backward()
    assert x.grad is not None
    backend = torch._C._select_conv_backend(x, w, None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups).name
    return backend, y.is_contiguous(memory_format=torch.channels_last), str(x.grad.device)
