"""Steps with tensors on the host on a real GPU, beside what the emitted code says: python -m tests.races.on_device [--plans 6]

Each model of `tests.correctness.test_offload` is trained for a step under random plans, while CUDA tells each event that is
recorded or waited for and each block of memory that is taken or freed.  The same code runs without kernels (`emitted`).  Both lists
must be equal, and the real one must have no race.  Prints a line of JSON for each plan; exit status 1 if one differs or has a race.
An order that differs is shown from the first difference on.  About a minute of the device; none has run it yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config

from compile_remat._torch.offload.streams import streams_of, streams_replaced
from compile_remat.compilation.driver import STRICT_OPTIONS, draws_in_turn
from compile_remat.inductor.entry import compile_with_partitioner
from compile_remat.inductor.observe import Emitted, observed
from tests.correctness.test_offload import MODELS
from tests.fuzz.partitioners import Moving
from tests.races.clocks import races
from tests.races.device_trace import DeviceTrace, NotedStreams, listening, order
from tests.races.emitted import trace_of_code

SHOWN = 5


class Trained:
    """A model on a device, compiled under the plan of a seed.

    Attributes:
        forward, backward: The code of its graphs.
        returned: Names of the values that the forward returns.
    """

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        module, given = MODELS[name]()
        self.module, self.given = module.to(device), given.to(device)
        self.returned: list[str] = []
        emitted = list[Emitted]()
        torch.compiler.reset()
        self._call: Callable[[torch.Tensor], torch.Tensor] = torch.compile(self.module, backend=self._backend(seed))
        with ExitStack() as stack:
            inner = observed(self._named(compile_fx.compile_fx_inner), emitted.append)
            stack.enter_context(mock.patch.object(compile_fx, "compile_fx_inner", inner))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            stack.enter_context(inductor_config.patch(force_disable_caches=True))
            self.step()
        self.forward, self.backward = sorted(emitted, key=lambda each: each.is_backward)

    def step(self) -> None:
        """A forward and its backward; nothing of them is left."""
        self._call(self.given).square().sum().backward()
        self.module.zero_grad()

    def expected(self) -> list[tuple[str, ...]]:
        """The order of a step by its code."""
        return order(trace_of_code(self.forward, self.backward, self.returned))

    def _backend(self, seed: int) -> Callable[..., Any]:
        def backend(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_with_partitioner(
                gm, inputs, Moving(seed), STRICT_OPTIONS, guarded=True, is_ordered=draws_in_turn
            )

        return backend

    def _named(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def compile_graph(gm: Any, inputs: Sequence[Any], **keywords: Any) -> Any:
            if not keywords.get("is_backward"):
                self.returned = [getattr(node, "name", "") for node in gm.graph.output_node().args[0]]
            return inner(gm, inputs, **keywords)

        return compile_graph


def compared(name: str, seed: int, found: DeviceTrace) -> dict[str, Any]:
    """A step of a model beside its code."""
    device = torch.device("cuda", 0)
    trained = Trained(name, seed, device)
    with streams_replaced("cuda", NotedStreams(streams_of(device), found)):
        trained.step()  # the host's allocator has its blocks from here on
        torch.cuda.synchronize()
        found.trace.clear()
        trained.step()
    torch.cuda.synchronize()
    real, expected = order(found.trace), trained.expected()
    first = next((k for k, pair in enumerate(itertools.zip_longest(real, expected)) if pair[0] != pair[1]), None)
    differ = None if first is None else {"real": real[first:][:SHOWN], "expected": expected[first:][:SHOWN]}
    return {
        "model": name,
        "plan": seed,
        "events": len(real),
        "is_equal": first is None,
        "first_difference": differ,
        "races": list(map(str, races(found.trace))),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="the order of copies on a GPU, beside that of the emitted code")
    parser.add_argument("--plans", type=int, default=6, help="random plans of each model; default 6")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    nn.Linear(8, 8, device="cuda")(torch.zeros(8, 8, device="cuda")).sum().backward()  # libraries take their memory
    found = DeviceTrace()
    listening(found)
    failed = False
    for name, seed in itertools.product(MODELS, range(arguments.plans)):
        row = compared(name, seed, found)
        failed |= bool(row["races"]) or not row["is_equal"]
        print(json.dumps(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
