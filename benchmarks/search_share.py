"""The part of the first call's CPU time that goes into the search for a plan, and into reading code that is not kept.

    python -m benchmarks.search_share [--model gpt] [--model "zoo bert"] [--setting 0.5] [--json OUT] [--show] [--toy]

Each row is a process of its own, which builds a model and has it traced, planned and lowered to code, forward and backward.  No
C++ compiler runs, the step itself does not either, and importing libraries and building the model are left out: what remains is
the first call's CPU time less the compilers'.  A module of three layers is lowered first: what torch imports and prepares once is
no observation, whoever lowers the first graph.  `search` is the choice of values to save, over all rounds, of the graph's
problem as it is built; `observations` are the lowering of plain torch.compile's partition, which a fraction asks for, rounds whose
plan was refused, and the reading of lowered graphs.  A row asks for a search of at most 5 % and, with observations, 25 %.

Models are those of `benchmarks.first_step`, and, with ``zoo`` before the name, those of `benchmarks.zoo`, where its libraries are
installed.  Rows are stored in OUT one by one, and those that are there already are not made again; `--show` makes none.
"""

import json
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx, nn

from benchmarks.common import harness
from benchmarks.common.first_step_run import MODELS, SCALES
from benchmarks.common.phases import phases_timed
from benchmarks.models import TOY_SCALE
from benchmarks.zoo import ENTRIES

ZOO = "zoo "
DEFAULT = (
    *SCALES,
    *(ZOO + name for name in ("bert", "t5", "dit", "resnet18", "swin", "conv_lstm", "gin", "efficientnet_b0")),
)
SETTINGS = ("0.5", "min")
SEARCH_LIMIT, LIMIT = 0.05, 0.25
SEARCH, PLAIN, READING, KEPT, REFUSED, STEP = "search", "plain", "reading", "kept round", "refused round", "step"
TITLES = ("model", "setting", "first call", "search", "share", "observations", "of plain", "both", "verdict")


@dataclass(frozen=True)
class ShareRow:
    """CPU seconds of one model's first call under one setting.

    Attributes:
        setting: Value of `memory_budget`.
        call_s: All of the call, without compilers and without the step itself.
        search_s: The search's part.
        observed_s: The observations' part.
        plain_s: Of these, the lowering of plain torch.compile's partition; None in rows made before this was counted.
    """

    model: str
    setting: str
    call_s: float
    search_s: float
    observed_s: float
    plain_s: float | None = None

    @property
    def search_share(self) -> float:
        return self.search_s / self.call_s

    @property
    def share(self) -> float:
        """The part of search and observations together."""
        return (self.search_s + self.observed_s) / self.call_s

    @property
    def verdict(self) -> str:
        """The reason why the row falls short, or `ok`."""
        if self.search_share > SEARCH_LIMIT:
            return f"miss: search above {SEARCH_LIMIT:.0%}"
        return "ok" if self.share <= LIMIT else f"miss: with observations above {LIMIT:.0%}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser_of_stored_rows(__doc__, (*MODELS, *(ZOO + entry.name for entry in ENTRIES)))
    parser.add_argument("--setting", action="append", help="a budget; may be repeated; default 0.5 and min")
    parser.add_argument("--toy", action="store_true", help="tiny models: checks the command, not the claims")
    arguments = parser.parse_args(argv)
    head, rows = harness.stored_rows(arguments.json, harness.header("cpu"), lambda fields: ShareRow(**fields))
    for model in () if arguments.show else arguments.model or DEFAULT:
        for setting in arguments.setting or SETTINGS:
            if all((row.model, row.setting) != (model, setting) for row in rows):
                harness.progress(f"{model} {setting}")
                rows.append(in_process(model, setting, is_toy=arguments.toy))
                harness.write_json(arguments.json, head, rows)
    harness.print_header(head)
    print(harness.ascii_table(*table(rows)), end="\n\n")
    print(summary(rows))
    return int(any(row.verdict != "ok" for row in rows))


def in_process(model: str, setting: str, *, is_toy: bool) -> ShareRow:
    """The row, made in a process of its own."""
    code = "import sys; from benchmarks import search_share; search_share.child(*sys.argv[1:])"
    command = [sys.executable, "-c", code, model, setting, str(int(is_toy))]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return ShareRow(**json.loads(output.splitlines()[-1]))


def child(model: str, setting: str, is_toy: str) -> None:
    """Makes a row in this process, and prints it."""
    warnings.simplefilter("ignore")  # torch says that its caches are off
    torch.set_num_threads(1)
    print(json.dumps(asdict(row_of(model, setting, is_toy=is_toy == "1"))), flush=True)


def row_of(model: str, setting: str, *, is_toy: bool) -> ShareRow:
    """The row of a model's first call in this process."""
    from benchmarks.common.code_only import plain_peaks_bytes, without_compiler
    from compile_remat.compilation import driver
    from compile_remat.compilation.readings import Readings
    from compile_remat.planning import joint_planning

    torch.manual_seed(0)
    module, step = built(model, is_toy=is_toy)
    small = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (torch.randn(8, 8),)
    runner = Runner(setting)
    phases: dict[str, tuple[Any, str]] = {
        SEARCH: (joint_planning, "_chosen"),
        PLAIN: (driver, "lowered_plain"),
        READING: (Readings, "__call__"),
        KEPT: (driver.Compilation, "_round"),
        STEP: (runner, "run"),
    }
    with without_compiler(), phases_timed(phases, raised={KEPT: REFUSED}) as spent:
        # Imports and preparations of Inductor's first graph are the call's, not an observation's.
        plain_peaks_bytes(*small)
        step(torch.compile(module, backend=runner.compile))
    observed_s = spent[PLAIN] + spent[READING] + spent[REFUSED]
    return ShareRow(model, setting, sum(spent.values()) - spent[STEP], spent[SEARCH], observed_s, spent[PLAIN])


class Runner:
    """Compiles graphs under a budget, and runs them as they are: their code has no kernels."""

    def __init__(self, setting: str) -> None:
        from compile_remat.config import RematConfig

        self.config = RematConfig.resolve({"memory_budget": setting})

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend of `torch.compile`."""
        from compile_remat.backend import compile_graph

        compile_graph(graph, inputs, self.config, {})
        return lambda *arguments: self.run(graph, *arguments)

    def run(self, graph: fx.GraphModule, *arguments: Any) -> Any:
        """One call of a graph."""
        return graph.forward(*arguments)


def built(model: str, *, is_toy: bool) -> tuple[nn.Module, Callable[[Callable[..., Any]], Any]]:
    """A module, and a call of it compiled."""
    from benchmarks.models import first_steps

    if not model.startswith(ZOO):
        return first_steps.built(model, TOY_SCALE if is_toy else SCALES.get(model, SCALES["gpt"]))
    from benchmarks.common.torchvision_operators import declare_missing_operators
    from benchmarks.zoo import entry_of

    declare_missing_operators()
    module, inputs = entry_of(model.removeprefix(ZOO)).build()
    return module.train(), lambda compiled: compiled(*inputs)


def table(rows: Sequence[ShareRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each row."""
    return TITLES, [
        [
            row.model,
            row.setting,
            f"{row.call_s:.1f} s",
            f"{row.search_s:.2f} s",
            f"{row.search_share:.1%}",
            f"{row.observed_s:.2f} s",
            "-" if row.plain_s is None else f"{row.plain_s:.2f} s",
            f"{row.share:.1%}",
            row.verdict,
        ]
        for row in rows
    ]


def summary(rows: Sequence[ShareRow]) -> str:
    """The shares of each setting."""
    lines = []
    for setting in dict.fromkeys(row.setting for row in rows):
        mine = [row for row in rows if row.setting == setting]
        for name, limit, shares in (
            ("search", SEARCH_LIMIT, [row.search_share for row in mine]),
            ("with observations", LIMIT, [row.share for row in mine]),
        ):
            close = sum(share <= limit for share in shares)
            lines.append(
                f"{setting}, {name}: median {statistics.median(shares):.1%} of the first call's CPU time, worst {max(shares):.1%}, "
                f"within {limit:.0%} on {close} of {len(shares)} rows"
            )
    return "\n".join(lines) or "no row"


if __name__ == "__main__":
    sys.exit(main())
