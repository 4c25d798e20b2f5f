"""Inductor's code for the CPU without a C++ compiler: for what asks about code and peaks, not about numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._functorch import config as functorch_config
from torch._inductor import async_compile
from torch._inductor import config as inductor_config


class NoKernel:
    """Stands for a kernel that was not built."""

    def __call__(self, *args: object) -> None:
        """Kernels that were not built cannot run."""
        raise AssertionError("this kernel was not compiled")


def _no_kernel(*args: Any, **kwargs: Any) -> NoKernel:
    return NoKernel()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Graphs are lowered and their code is emitted, nothing is built and nothing cached; what is compiled here cannot run."""
    with (
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", _no_kernel),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        yield
