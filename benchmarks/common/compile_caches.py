"""Compilations whose partitioner really runs: without graph caches, and with a kernel folder of their own.

Private names of torch: `torch._functorch.config.enable_autograd_cache` and `torch._inductor.config.fx_graph_cache`, 2.11 to 2.15.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def without_graph_caches() -> Iterator[None]:
    """Graph caches off, so that every compile really runs its partitioner; kernels built earlier are still found."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextmanager
def private_compile_caches() -> Iterator[None]:
    """Graph caches off and a new folder for compiled kernels, so that every compile really runs its partitioner.

    The folder is shared by all compiles inside: equal kernels are built once.
    """
    with (
        tempfile.TemporaryDirectory(prefix="remat-bench-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        without_graph_caches(),
    ):
        yield
