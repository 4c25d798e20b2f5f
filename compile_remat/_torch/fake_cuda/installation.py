"""The Python side of the fake device: the properties of a device that ``torch.cuda``, Dynamo, Inductor and Triton read.

Private names of torch, 2.11 to 2.13.  `install` replaces them for the whole process.
"""

from __future__ import annotations

import os
import tempfile
import types
from typing import Any

from compile_remat._torch.fake_cuda import hooks
from compile_remat._torch.fake_cuda.device import H100, FakeDevice


def install(device: FakeDevice = H100, *, compiled: bool = False) -> None:
    """Make this process treat one fake CUDA device as real.

    Args:
        compiled: True to compile Triton kernels to cubins; False to emit their source only.

    Raises:
        RuntimeError: Torch is imported already, or g++ cannot build the hooks.
    """
    hooks.register()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="fake_cuda"))
    _answer_for_torch_cuda(device)
    _answer_for_fake_tensors()
    _answer_for_dynamo()
    _answer_for_inductor(device)
    _answer_for_triton(device)
    _replace_kernels(compiled)
    _fold_constants_on_cpu()


def _answer_for_torch_cuda(device: FakeDevice) -> None:
    import torch

    cuda: Any = torch.cuda
    answers = {
        "_is_compiled": True,
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "get_device_properties": device.properties(),
        "get_device_capability": device.capability,
        "get_device_name": device.name,
        "get_arch_list": ["sm_" + "".join(map(str, device.capability))],
        "is_bf16_supported": device.has_bfloat16,
        "is_tf32_supported": device.has_bfloat16,
        "mem_get_info": (device.memory_bytes, device.memory_bytes),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "memory_stats": {},
        "get_per_process_memory_fraction": 1.0,
        "_lazy_init": None,
        "synchronize": None,
        "set_device": None,
        "empty_cache": None,
        "set_rng_state": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(cuda, name, _always(answer))
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.version.cuda = torch.version.cuda or "13.0"
    library: Any = torch._C
    library._cuda_getCurrentRawStream = _always(0)
    library._cuda_cudaCachingAllocator_is_enabled = _always(True)


def _always(answer: object) -> Any:
    return lambda *args, **kwargs: answer


def _answer_for_fake_tensors() -> None:
    """Replace two functions: torch would initialise CUDA for a fake CUDA tensor, and allocate a tensor of Python numbers on it."""
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = _always(None)
    mode: Any = fake_tensor.FakeTensorMode
    mode.avoid_device_init = property(lambda self: True)


def _answer_for_dynamo() -> None:
    import torch
    from torch._dynamo.device_interface import CudaInterface

    interface: Any = CudaInterface
    for name in (
        "current_device",
        "device_count",
        "get_device_properties",
        "set_device",
        "synchronize",
        "current_stream",
    ):
        setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(interface, name, staticmethod(_always(0)))


def _answer_for_inductor(device: FakeDevice) -> None:
    """Answer with the data sheet's bandwidth and rates.  Inductor times products with padded operands unless memory-bound."""
    import torch
    from torch._inductor import utils

    module: Any = utils
    module.get_gpu_dram_gbps = _always(device.bandwidth_gbps)
    module.get_device_tflops = lambda dtype: device.float32_tflops if dtype is torch.float32 else device.tflops


def _answer_for_triton(device: FakeDevice) -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    properties = device.properties()
    limits = {
        "max_shared_mem": properties.shared_memory_per_block_optin,
        "multiprocessor_count": properties.multi_processor_count,
        "warpSize": properties.warp_size,
        "max_num_regs": properties.regs_per_multiprocessor,
        "sm_clock_rate": properties.clock_rate,
        "mem_clock_rate": properties.memory_clock_rate,
        "mem_bus_width": properties.memory_bus_width,
    }
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * device.capability[0] + device.capability[1], 32),
        get_current_device=_always(0),
        get_current_stream=_always(0),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=_always(device.capability),
        get_device_interface=lambda: torch.cuda,
        is_active=_always(True),
        utils=types.SimpleNamespace(get_device_properties=_always(limits)),
    )
    triton.runtime.driver.set_active(driver)


class NoKernel:
    """Stands for a missing kernel: has any attribute, and does nothing when called."""

    def __getattr__(self, name: str) -> NoKernel:
        return self

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None


def _replace_kernels(compiled: bool) -> None:
    from torch._inductor import async_compile
    from torch._inductor.runtime import triton_helpers

    module: Any = async_compile
    triton_helpers.set_driver_to_gpu = _always(None)  # every kernel's module begins with it

    def triton(self: object, kernel_name: str, source_code: str, device_str: str = "cuda") -> NoKernel:
        if compiled:
            kernel = module._load_triton_kernel_from_source(kernel_name, source_code)
            kernel.precompile(warm_cache_only=True)  # to a cubin, without loading it
        return NoKernel()

    module.AsyncCompile.triton = triton


def _fold_constants_on_cpu() -> None:
    """Have Inductor's constant folding make its small tensors, which have data, on the CPU."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if getattr(kwargs.get("device"), "type", None) == "cuda":
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)

    folder: Any = ConstantFolder
    run = folder.run

    def run_on_cpu(self: object, *args: object, **kwargs: object) -> Any:
        with OnCpu():  # type: ignore[no-untyped-call]
            return run(self, *args, **kwargs)

    folder.run = run_on_cpu
