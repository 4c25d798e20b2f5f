"""Inductor's code for the CPU without a C++ compiler: for what asks about code and peaks, not about numbers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch._functorch import config as functorch_config
from torch._inductor import async_compile
from torch._inductor import config as inductor_config


def _refuse(*args: object) -> None:
    raise AssertionError("this kernel was not compiled")


@contextmanager
def kernels_replaced_by(function: Callable[..., None]) -> Iterator[None]:
    """Inductor generates all code and calls `function` wherever it would call a C++ kernel; no C++ is compiled."""
    with mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: function):
        yield


@contextmanager
def without_compiler() -> Iterator[None]:
    """Graphs are lowered and their code is emitted, nothing is built and nothing cached; what is compiled here cannot run."""
    with (
        kernels_replaced_by(_refuse),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(force_disable_caches=True),
    ):
        yield
