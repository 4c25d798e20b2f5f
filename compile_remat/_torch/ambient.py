"""The state of torch around a call: random generators, autocast, dispatch modes, the tracing context, Dynamo's lock.

Private names of torch, 2.11 to 2.15: ``torch._guards.tracing``, ``torch.utils._python_dispatch._disable_current_modes`` and
``torch._dynamo.convert_frame.compile_lock``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch._guards import tracing

from compile_remat._torch.version import private_name

disable_current_modes = private_name("torch.utils._python_dispatch", "_disable_current_modes")
compile_lock = private_name("torch._dynamo.convert_frame", "compile_lock")
_session = getattr(torch.compiler, "_compile_session_context", nullcontext)
"""From 2.13 on: lets other threads call compiled functions meanwhile without torch's error that FX is tracing them."""


@dataclass(frozen=True)
class Ambient:
    """The state of torch under which a graph is traced and which the graph does not hold: autocast, by device type."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Ambient:
        """Returns this thread's state."""
        kinds = ("cpu", "cuda")
        return cls(tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds))

    def enter(self, stack: ExitStack) -> None:
        """Restore this state until `stack` ends, with gradients enabled and without a tracing context."""
        for kind, enabled, dtype in self.autocast:
            if enabled != torch.is_autocast_enabled(kind) or enabled:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracing(None))


@contextmanager
def compiling_as_dynamo_does() -> Iterator[None]:
    """Allow one compilation at a time in the process: FX and AOTAutograd keep their tracing state in global variables.

    The lock is Dynamo's, and reentrant.  Inside, never acquire a lock that another thread may hold while it enters this context.
    """
    with compile_lock, _session():
        yield


@contextmanager
def plainly(device: torch.device) -> Iterator[None]:
    """Run without gradients, without autocast, and outside of the dispatch modes of a trace or compilation under way."""
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield


def read_random_state(devices: Sequence[torch.device]) -> dict[str, torch.Tensor]:
    """Returns the state of the CPU's random generator, and of the generator of each of `devices`, by device name."""
    states = {"cpu": torch.get_rng_state()}
    return states | {str(d): torch.get_device_module(d).get_rng_state(d) for d in devices}


def write_random_state(states: dict[str, torch.Tensor]) -> None:
    """Restore the generator states that `read_random_state` returned."""
    for place, state in states.items():
        if place == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(torch.device(place)).set_rng_state(state, torch.device(place))
