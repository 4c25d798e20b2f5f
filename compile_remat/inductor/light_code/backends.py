"""Replaces Inductor's code generators for C++ and Triton by code generators that write no kernels."""

from __future__ import annotations

from typing import Any

from compile_remat._torch.version import private_name
from compile_remat.inductor.cpp_kernels.scheduling import SeparateKernels
from compile_remat.inductor.light_code.cpp import LightCpp
from compile_remat.inductor.light_code.kernels import Kernels
from compile_remat.inductor.light_code.triton import LightTriton

CppScheduling = private_name("torch._inductor.codegen.cpp", "CppScheduling")
TritonScheduling = private_name("torch._inductor.codegen.triton", "TritonScheduling")


def use_light_backends(scheduler: Any, kernels: Kernels) -> None:
    """Give a scheduler code generators that write no kernels, for the devices that Inductor makes C++ or Triton for.

    Any other code generator makes its kernels as usual.

    Args:
        kernels: Receives the kernels while the scheduler makes its code.
    """
    before = scheduler.backends
    scheduler.backends = {}
    for device in {node.get_device() for node in scheduler.nodes} - {None}:
        backend = scheduler.get_backend(device)
        if type(backend) is CppScheduling:
            is_apart = isinstance(before.get(device), SeparateKernels)
            scheduler.backends[device] = LightCpp(scheduler, kernels, is_apart)
        elif type(backend) is TritonScheduling:
            scheduler.backends[device] = LightTriton(scheduler, kernels)
        elif type(getattr(backend, "_triton_scheduling", None)) is TritonScheduling:
            backend._triton_scheduling = LightTriton(scheduler, kernels)
