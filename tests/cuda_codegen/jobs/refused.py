"""A round whose code is refused, and one that is accepted: how many kernels had been asked for behind each, and in all.

Inductor is told that compiling processes are there, to which it hands kernels while it writes code and again when it loads it;
equal ones are counted once.  Prints one line of JSON.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from compile_remat._torch.fake_cuda.installation import install


def main() -> dict[str, Any]:
    install(compiled=False)
    from torch._inductor.async_compile import AsyncCompile

    from benchmarks.common.fake_cuda import step
    from compile_remat.compilation.readings import PlanRefused
    from compile_remat.compilation.rounds import Rounds
    from compile_remat.planning.request import FitBelow
    from tests.cuda_codegen import toys

    asked: list[str] = []
    rounds: list[int] = []
    triton, judge = AsyncCompile.triton, Rounds.judge

    def count(self: AsyncCompile, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(source_code)
        return triton(self, kernel_name, source_code, *args, **kwargs)

    def refuse_once(self: Rounds, reports: Any, run: Any) -> None:
        rounds.append(len(asked))
        if len(rounds) == 1:
            self.partitioner = replace(self.partitioner, request=FitBelow(int(0.9 * reports[0].plan.peak_bytes)))
            raise PlanRefused
        judge(self, reports, run)

    AsyncCompile.triton = count  # type: ignore[method-assign]
    AsyncCompile.use_process_pool = classmethod(lambda cls: threads() > 1)  # type: ignore[assignment]
    Rounds.judge = refuse_once  # type: ignore[method-assign]
    emitted = step.compile_step(lambda: toys.make(None), step.ours("0.8"))
    last = "\n".join(e.source_code for e in emitted[-2:])
    return {"rounds": rounds, "asked": len(set(asked)), "in the code": last.count("async_compile.triton(")}


def threads() -> int:
    """The processes that Inductor may compile in, as it is told at this moment."""
    from torch._inductor.async_compile import get_compile_threads

    return get_compile_threads()


if __name__ == "__main__":
    print(json.dumps(main()))
