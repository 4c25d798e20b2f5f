"""Several compiled graphs under one budget: the peak of the whole step, from the first one on.

    python -m benchmarks.together [--case blocks] [--toy] [--json OUT]

`blocks` compiles each of GPT's 12 blocks by itself (one graph that runs twelve times in a step), `breaks` the whole GPT
with three graph breaks, `apart` an encoder and a decoder one by one. The loss is a compiled graph of its own. Budgets are
bytes, as fractions of the whole step's measured peak under plain torch.compile, and `min`. `first` is the peak of the first step:
in `breaks` Dynamo says that graphs follow, and each takes a plan that leaves room for them; in `blocks` and `apart`
the callables do not know of each other before a step has shown it: there the first step may be above the budget, and a warning says
by how much. `later` is the highest of three more; plans that are made for all graphs together run from the second or third step on.
The exit status is 1 if another peak is above its budget, if a smaller budget has a higher peak, or for an error at a budget that
`min` stays inside.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import mib, percent
from compile_remat.device.measure import peak_bytes

FRACTIONS = (0.6, 0.4, 0.3)
STRANGERS = ("blocks", "apart")
"""Cases whose graphs do not know in the first step which others follow."""
LATER_STEPS = 3
TITLES = ("case", "graphs", "setting", "budget", "first", "later", "use", "verdict")

Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
"""`torch.compile` with the arguments of one configuration."""


@dataclass(frozen=True)
class StepRow:
    """One configuration of one case; peaks are those of whole steps, in bytes."""

    case: str
    setting: str
    graphs: int | None = None
    budget_bytes: int | None = None
    first_peak_bytes: int | None = None
    later_peak_bytes: int | None = None
    floor_bytes: int | None = None
    failure: str | None = None
    verdict: str = ""

    @property
    def use(self) -> float | None:
        """The highest peak of the steps that a budget is kept in, over it."""
        peaks = [self.later_peak_bytes] if self.case in STRANGERS else [self.first_peak_bytes, self.later_peak_bytes]
        if self.budget_bytes is None or None in peaks:
            return None
        return max(peak or 0 for peak in peaks) / self.budget_bytes

    @property
    def is_first_above(self) -> bool:
        """True if the first step, which need not keep the budget, exceeds the budget."""
        return self.case in STRANGERS and (self.first_peak_bytes or 0) > (self.budget_bytes or sys.maxsize)


def blocks(wrap: Wrap, scale: float, device: str, seed: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """GPT whose blocks are compiled one by one, as regional compilation does."""
    case = models.build("gpt", scale=scale, device=device, seed=seed)
    loss = wrap(torch.mean)
    parts = [wrap(block) for block in case.module.children()]

    def forward() -> Tensor:
        x = case.inputs[0]
        for part in parts:
            x = part(x)
        return loss(x)

    return case.module, forward


def breaks(wrap: Wrap, scale: float, device: str, seed: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """GPT in one function with three graph breaks."""
    case = models.build("gpt", scale=scale, device=device, seed=seed)
    layers = list(case.module.children())
    ends = {len(layers) * quarter // 4 for quarter in (1, 2, 3)}

    def whole(x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            if number in ends:
                torch._dynamo.graph_break()
            x = layer(x)
        return x.mean()

    step = wrap(whole)
    return case.module, lambda: step(case.inputs[0])


def apart(wrap: Wrap, scale: float, device: str, seed: int) -> tuple[nn.Module, Callable[[], Tensor]]:
    """An encoder and a decoder, compiled one by one."""
    case = models.build("encoder_decoder", scale=scale, device=device, seed=seed)
    source, target = case.inputs

    def encode(x: Tensor) -> Tensor:
        for block in case.module.encoder:  # type: ignore[union-attr]
            x = block(x)
        return x

    def decode(x: Tensor, memory: Tensor) -> Tensor:
        for block in case.module.decoder:  # type: ignore[union-attr]
            x = block(x, memory)
        return x.mean()

    encoder, decoder = wrap(encode), wrap(decode)
    return case.module, lambda: decoder(target, encoder(source))


CASES = {"blocks": blocks, "breaks": breaks, "apart": apart}


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be repeated; default all")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    everything: list[StepRow] = []
    with private_compile_caches():
        for name in arguments.case or CASES:
            rows = judge(rows_of_case(name, arguments))
            everything += rows
            print(harness.ascii_table(*table(rows)), end="\n\n", flush=True)
    harness.write_json(arguments.json, head, everything)
    return int(any(row.verdict.startswith("miss") for row in everything))


def rows_of_case(name: str, arguments: argparse.Namespace) -> list[StepRow]:
    plain = _measured(StepRow(name, "default"), {}, arguments)
    rows = [plain]
    if plain.later_peak_bytes is not None:
        for fraction in FRACTIONS:
            budget_bytes = int(fraction * plain.later_peak_bytes)
            row = StepRow(name, str(fraction), budget_bytes=budget_bytes)
            rows.append(_measured(row, {"memory_budget": budget_bytes}, arguments))
    return [*rows, _measured(StepRow(name, "min"), {"memory_budget": "min"}, arguments)]


def judge(rows: Sequence[StepRow]) -> list[StepRow]:
    """The rows of one case, in falling order of their budgets, with their verdicts."""
    judged = []
    lowest: int | None = None
    reached = next((row.later_peak_bytes for row in rows if row.setting == "min"), None)
    for row in rows:
        reasons = [] if row.failure is None else [row.failure]
        if row.floor_bytes and row.budget_bytes and reached is not None and reached <= row.budget_bytes:
            reasons.append("an error although min stays inside")
        if row.use is not None and row.use > 1:
            reasons.append("above the budget")
        if lowest is not None and row.later_peak_bytes is not None and row.later_peak_bytes > lowest:
            reasons.append("above the peak of a larger budget")
        if row.later_peak_bytes is not None:
            lowest = min(lowest or row.later_peak_bytes, row.later_peak_bytes)
        fine = "ok, the first step above" if row.is_first_above else "ok"
        fine = fine if row.floor_bytes is None else f"floor {mib(row.floor_bytes)}"
        judged.append(replace(row, verdict="miss: " + "; ".join(reasons) if reasons else fine))
    return judged


def _measured(row: StepRow, options: dict[str, Any], arguments: argparse.Namespace) -> StepRow:
    """The row with its peaks; what a broken configuration raised is its failure."""
    import compile_remat
    from compile_remat.backend import remat as backend

    harness.progress(f"{row.case}: {row.setting}")
    torch.compiler.reset()
    compile_remat.reset_reports()
    compile_arguments = {"backend": backend, "options": options} if options else {}
    make = CASES[row.case]
    module, forward = make(
        lambda f: torch.compile(f, **compile_arguments),
        harness.scale_of(arguments),
        arguments.device,
        arguments.seed,
    )

    def step() -> None:
        forward().backward()

    peaks = []
    try:
        for _ in range(1 + LATER_STEPS):
            gc.collect()
            peaks.append(peak_bytes(step, arguments.device).peak_bytes)
            module.zero_grad()
    except compile_remat.BudgetError as error:
        return replace(row, floor_bytes=error.floor_bytes)
    except Exception as error:  # one broken row must not lose the others; its verdict is a miss
        return replace(row, failure=f"{type(error).__name__}: {error}".splitlines()[0])
    graphs = len({report.graph_key for report in compile_remat.reports()}) if options else None
    return replace(row, graphs=graphs, first_peak_bytes=peaks[0], later_peak_bytes=max(peaks[1:]))


def table(rows: Sequence[StepRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles and cells."""
    return TITLES, [_cells(row) for row in rows]


def _cells(row: StepRow) -> list[str]:
    return [
        row.case,
        "-" if row.graphs is None else str(row.graphs),
        row.setting,
        mib(row.budget_bytes),
        mib(row.first_peak_bytes),
        mib(row.later_peak_bytes),
        percent(row.use),
        row.verdict,
    ]


if __name__ == "__main__":
    sys.exit(main())
