"""What running a single operator of a traced graph takes of torch's private names.

Same in 2.11 to 2.15: ``torch.utils._python_dispatch._disable_current_modes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from compile_remat._torch.operators import OpOverload, is_mutable
from compile_remat._torch.version import private_name

disable_current_modes = private_name("torch.utils._python_dispatch", "_disable_current_modes")

_TALKS = ("c10d", "dtensor", "symm_mem", "fsdp", "distributed", "rpc")
"""Parts of the names of libraries whose operators wait for other processes."""


def can_run_alone(target: object) -> bool:
    """Whether a node's target is an operator that writes into nothing and waits for no other process."""
    if not isinstance(target, OpOverload):
        return False
    return not is_mutable(target) and not any(part in target.namespace for part in _TALKS)


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, and none of the modes of whoever traces or compiles meanwhile."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
