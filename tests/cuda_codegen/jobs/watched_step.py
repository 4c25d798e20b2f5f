"""Races of a toy's Triton code under random plans with tensors on the host: python -m tests.cuda_codegen.jobs.watched_step PLANS

Prints a line of JSON for each plan: its copies, Triton kernels and races, and by kind its waits, and those without which there is a
race.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from compile_remat._torch.fake_cuda.installation import install


def main(plans: int) -> Iterator[dict[str, Any]]:
    install()
    from tests.races.clocks import has_race, races, waits
    from tests.races.emitted import trace_of_code

    for seed in range(plans):
        forward, backward, returned = _emitted(seed)
        trace = trace_of_code(forward, backward, returned)
        yield {
            "copies": forward.source_code.count("compile_remat.stash.default("),
            "triton": forward.source_code.count("async_compile.triton("),
            "races": list(map(str, races(trace))),
            "waits": Counter(wait.kind for wait in waits(trace)),
            "found": Counter(wait.kind for wait in waits(trace) if has_race(trace, [wait.number])),
        }


def _emitted(seed: int) -> tuple[Any, Any, list[str]]:
    """The code of forward and backward, and the names of the values that the forward returns."""
    from torch._inductor import compile_fx

    from benchmarks.common.fake_cuda.step import compile_step
    from compile_remat.compilation.driver import STRICT_OPTIONS
    from compile_remat.inductor.entry import compile_with_partitioner
    from tests.cuda_codegen.toys import drop, make
    from tests.fuzz.partitioners import Moving

    outputs: list[list[str]] = []
    inner = compile_fx.compile_fx_inner

    def named(gm: Any, inputs: Sequence[Any], **keywords: Any) -> Any:
        if not keywords.get("is_backward"):
            outputs.append([getattr(node, "name", "") for node in gm.graph.output_node().args[0]])
        return inner(gm, inputs, **keywords)

    def use(gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_with_partitioner(gm, inputs, Moving(seed), STRICT_OPTIONS, guarded=True)

    with mock.patch.object(compile_fx, "compile_fx_inner", named):
        forward, backward = compile_step(lambda: make(drop), use)
    return forward, backward, outputs[0]


if __name__ == "__main__":
    for line in main(int(sys.argv[1])):
        print(json.dumps(line))
