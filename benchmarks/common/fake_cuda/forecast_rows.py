"""The peaks of code that is emitted on the fake device for a builder's step, in a process that has it.

Run as a module; its arguments are ``SOURCE DTYPE BUDGET ...``, a builder's and `memory_budget`.  Prints one line of JSON for each
budget: the peak of the code that would run, in bytes, by a dry run; None where it is refused, with the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from compile_remat._torch.fake_cuda.installation import install


def main(arguments: Sequence[str]) -> None:
    source, dtype, *budgets = arguments
    install()
    from benchmarks.common import harness
    from benchmarks.common.fake_cuda import step
    from compile_remat.compilation.region_run import run_region
    from compile_remat.forecast.builders import Builder
    from compile_remat.forecast.fake_trace import built

    def build() -> tuple[Any, Any]:
        return built(Builder(source, dtype=dtype))

    for budget in budgets:
        peak_bytes, reason = None, ""
        try:
            peak_bytes = run_region(*step.compile_step(build, step.ours(budget))[-2:]).peak_bytes
        except Exception as error:  # one broken row must not lose the others
            reason = harness.reason_of(error)
        print(json.dumps({"budget": budget, "peak_bytes": peak_bytes, "failure": reason}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
