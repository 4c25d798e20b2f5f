"""One row of `benchmarks.first_step`: three steps of a model in a process of its own, and what that took.

Run as a module it is that process; its arguments are ``MODEL SETTING SCALE``, and it prints one line of JSON.
"""

import compileall
import json
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.compiler_calls import run_counted

PLAIN = "plain"
SCALES = {"gpt": 0.5, "bert": 0.5, "mixer": 0.4, "llama": 0.5, "vit": 0.5, "resnet": 0.3, "encoder_decoder": 0.4}
"""Seven of the benchmarks' models, with the scale that they are built at: their compilation takes less than a minute."""
BROKEN = "gpt, graph break"
HUGGING_FACE = ("transformers bert", "transformers gpt2", "transformers llama", "transformers t5", "transformers vit")
MODELS = (*SCALES, BROKEN, *HUGGING_FACE)
STEPS = 3


@dataclass(frozen=True)
class Taken:
    """Costs of a process until the end of its third step.

    Attributes:
        cpu_s: CPU seconds of the process and of all that it started and that ended.
        num_files: Files that the C++ compiler was called with, each counted once.
        graphs: Compiled graphs that have a report.
        lowered: Graphs that Inductor made code for, forwards and backwards apart; None where they were not counted.
    """

    cpu_s: float
    wall_s: float
    num_files: int = 0
    graphs: int = 0
    lowered: int | None = None


def missing_package(model: str) -> str:
    """The reason why a model cannot be built here; empty if it can."""
    return "transformers is not installed" if model in HUGGING_FACE and find_spec("transformers") is None else ""


def run(model: str, setting: str, *, is_toy: bool) -> tuple[Taken, Taken]:
    """Two processes that share folders, the first of which finds them empty.

    Both find this package as `pip` leaves it, as bytecode: its sources take 0.3 CPU seconds more.
    """
    root = Path(__file__).parents[2]
    for package in ("compile_remat", "passes", "cost_models", "benchmarks"):
        compileall.compile_dir(root / package, quiet=1)
    with tempfile.TemporaryDirectory(prefix="remat-first-step-", ignore_cleanup_errors=True) as folder:
        first = _process(model, setting, Path(folder), is_toy=is_toy)
        return first, _process(model, setting, Path(folder), is_toy=is_toy)


def _process(model: str, setting: str, folder: Path, *, is_toy: bool) -> Taken:
    command = [sys.executable, "-m", "benchmarks.common.first_step_run", model, setting, str(int(is_toy))]
    output, files = run_counted(command, folder)
    return Taken(**{**json.loads(output.splitlines()[-1]), "num_files": len(files)})


def main() -> int:
    model, setting, is_toy = sys.argv[1:]
    start = time.perf_counter()
    taken = _three_steps(model, setting, is_toy=is_toy == "1")
    wall_s = time.perf_counter() - start
    print(json.dumps({**asdict(taken), "wall_s": wall_s}))
    return 0


def _three_steps(model: str, setting: str, *, is_toy: bool) -> Taken:
    import torch

    from benchmarks.models import TOY_SCALE
    from benchmarks.models.first_steps import built

    torch.manual_seed(0)
    module, step = built(model, TOY_SCALE if is_toy else SCALES.get(model, SCALES["gpt"]))
    graphs = 0
    if setting == PLAIN:
        compiled = torch.compile(module)
    else:
        from compile_remat.backend import remat

        compiled = torch.compile(module, backend=remat, options={"memory_budget": setting})
    for _ in range(STEPS):
        module.zero_grad()
        step(compiled).backward()
    if setting != PLAIN:
        import compile_remat

        graphs = len(compile_remat.reports())
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    counted = torch._dynamo.utils.counters["inductor"]
    lowered = counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]
    return Taken(cpu_s, 0.0, graphs=graphs, lowered=lowered)


if __name__ == "__main__":
    sys.exit(main())
