"""All decisions of the planner as one file of hashes: a change that only moves or renames code must leave the file equal.

    python -m benchmarks.digest [--part plans] [--part problems] [--part code] [--quick] [--write]
    python -m benchmarks.digest --store-problems

`plans` plans the stored problems of `benchmarks/results/digest_problems.json.gz` for five budgets each, `problems` builds the
problems of the benchmarks' models anew, `code` has Inductor emit code (kernel sources included, nothing is compiled) for six
models at 0.5 and `min`. Each is compared with `benchmarks/results/digest.json`, which `--write` replaces. For plans that
differ, the change of peak and of extra time stands beside the row. The exit status is 1 where anything differs.
"""

import argparse
import gzip
import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import models
from benchmarks.common import synthetic
from benchmarks.common.code_only import without_compiler
from benchmarks.common.harness import ascii_table
from compile_remat.api import look
from compile_remat.inductor.cpp_kernels.building import HEADER
from compile_remat.passes import Planner, Problem
from compile_remat.runtime.process_state import clear_process_state

RESULTS = Path(__file__).parent / "results"
DIGEST, PROBLEMS = RESULTS / "digest.json", RESULTS / "digest_problems.json.gz"
FRACTIONS = (0.8, 0.6, 0.4, 0.3)
CODE_MODELS = {"gpt": 0.3, "llama": 0.3, "resnet": 0.3, "unet": 1.0, "densenet": 1.0, "experts": 0.3}
"""Scales at which 0.5 of plain's peak can be reached."""
SMALL_SCALE = 0.3
PARTS = ("plans", "problems", "code")
QUICK = 3
"""`--quick` takes one row of this many."""

Rows = dict[str, dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    torch.set_num_threads(2)  # workspaces of kernels depend on it
    if arguments.store_problems:
        return _store_problems()
    stored: dict[str, Any] = json.loads(DIGEST.read_text()) if DIGEST.exists() else {}
    num_different = 0
    for part in arguments.part or PARTS:
        start = time.perf_counter()
        found = MAKERS[part](QUICK if arguments.quick else 1)
        known: Rows = stored.get(part, {})
        different = [name for name, row in found.items() if known.get(name) != row]
        num_different += len(different)
        print(f"{part}: {len(found)} rows, {len(different)} differ ({time.perf_counter() - start:.0f} s)", flush=True)
        if different:
            cells = [_difference(name, known.get(name, {}), found[name]) for name in different]
            print(ascii_table(("row", "before", "after", "peak", "extra time / step"), cells))
        stored[part] = {**known, **found}
    if arguments.write:
        DIGEST.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        return 0
    return int(bool(num_different))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; default all")
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}rd row only")
    parser.add_argument("--write", action="store_true", help="replace the stored digest")
    parser.add_argument("--store-problems", action="store_true", help="make the stored problems anew")
    return parser.parse_args(argv)


def _difference(name: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    cells = [name, str(before.get("hash", "-")), str(after["hash"]), "", ""]
    if "peak_bytes" in before and "peak_bytes" in after:
        cells[3] = f"{after['peak_bytes'] / max(1, before['peak_bytes']) - 1:+.2%}"
        cells[4] = f"{(after['extra_ns'] - before['extra_ns']) / max(1, after['step_ns']):+.3%}"
    return cells


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- plans of stored problems -------------------------------------------------------------------------------------------


def _problem_of(name: str, scale: float) -> Problem:
    case = models.build(name, scale=scale)
    (planned,) = look(case.module, case.inputs, for_budgets=True, memory_budget="max", device="cpu", capacity="100GiB")
    return planned.problem


def _store_problems() -> int:
    problems = {name: _problem_of(name, 1.0) for name in models.CASES}
    for name in ("gpt", "bert", "resnet", "unet", "encoder_decoder", "recurrent", "convnext", "experts"):
        problems[f"{name} small"] = _problem_of(name, SMALL_SCALE)
    problems["4 equal layers"] = synthetic.equal_layers(4)
    problems["32 equal layers"] = synthetic.equal_layers(32)
    problems["12 unequal layers"] = synthetic.unequal_layers(12)
    problems["24 unequal layers"] = synthetic.unequal_layers(24, seed=1)
    text = json.dumps({name: json.loads(problem.to_json()) for name, problem in problems.items()})
    PROBLEMS.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{PROBLEMS}: {len(problems)} problems, {PROBLEMS.stat().st_size} bytes")
    return 0


def stored_problems() -> dict[str, Problem]:
    """The problems that plans are compared on, by name."""
    stored: dict[str, Any] = json.loads(gzip.decompress(PROBLEMS.read_bytes()))
    return {name: Problem.from_json(json.dumps(data)) for name, data in stored.items()}


def _plans(every: int) -> Rows:
    rows: Rows = {}
    for name, problem in list(stored_problems().items())[::every]:
        peak_bytes = Planner(problem).fastest().peak_bytes
        for setting in (*FRACTIONS, "min"):
            planner = Planner(problem)
            plan = planner.lowest() if setting == "min" else planner.within(int(float(setting) * peak_bytes))
            chosen = [plan.saved, plan.again, plan.status, plan.peak_bytes, plan.extra_time_ns, plan.bound_time_ns]
            rows[f"{name} {setting}"] = {
                "hash": _hash(json.dumps(chosen)),
                "peak_bytes": plan.peak_bytes,
                "extra_ns": plan.extra_time_ns,
                "step_ns": problem.step_time_ns,
            }
    return rows


# -- problems as they are built -----------------------------------------------------------------------------------------


LATER_FIELDS = frozenset({"is_snapshot"})
"""Fields of a problem's nodes that are newer than the stored digest: they are left out of the hash if empty."""


def _problems(every: int) -> Rows:
    rows: Rows = {}
    for name in list(models.CASES)[::every]:
        problem = _problem_of(name, 1.0)
        data = json.loads(problem.to_json())
        for node in (*data["values"], *data["steps"]):
            node["origin"]["source_line"] = ""  # a model's line may move
            for field in [f for f, value in node.items() if f in LATER_FIELDS and not value]:
                del node[field]
        rows[name] = {"hash": _hash(json.dumps(data, sort_keys=True)), "key": problem.key()}
    return rows


# -- code as Inductor emits it ------------------------------------------------------------------------------------------


def emitted(module: Callable[..., Any], inputs: Sequence[Any], memory_budget: object) -> Iterator[str]:
    """Code of forward and backward, kernel sources inside; no compiler runs."""
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx

    from compile_remat.backend import remat

    sources: list[str] = []
    inner = compile_fx.compile_fx_inner

    def compile_one(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        compiled = inner(gm, example_inputs, **kwargs)
        sources.append(str(compiled.source_code))
        return compiled

    def backend(gm: Any, example_inputs: Any) -> Any:
        remat(gm, example_inputs, options={"memory_budget": memory_budget})
        return gm.forward

    torch.compiler.reset()
    clear_process_state()  # a fraction is of the largest step so far
    with (
        warnings.catch_warnings(action="ignore"),  # torch says that its caches are off
        without_compiler(),
        mock.patch.object(compile_fx, "compile_fx_inner", compile_one),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        torch.compile(module, backend=backend)(*inputs)
    torch.compiler.reset()
    for source in sources:
        lines = source.splitlines()
        yield "\n".join(line for line in lines if "AOT ID" not in line and line not in HEADER)


def _code(every: int) -> Rows:
    rows: Rows = {}
    for name, scale in list(CODE_MODELS.items())[::every]:
        for setting in (0.5, "min"):
            case = models.build(name, scale=scale)
            texts = list(emitted(case.module, case.inputs, setting))
            assert texts, f"{name}: nothing was compiled"
            rows[f"{name} {setting}"] = {"hash": _hash("\n".join(texts)), "num_graphs": len(texts)}
    return rows


MAKERS: dict[str, Callable[[int], Rows]] = {"plans": _plans, "problems": _problems, "code": _code}

if __name__ == "__main__":
    sys.exit(main())
