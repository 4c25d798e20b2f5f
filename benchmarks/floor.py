"""Below the floor: peaks at `min` where each gradient leaves the backward when it is made (`gradients="early"`).

    python -m benchmarks.floor [--model gpt] [--toy] [--json OUT]

Every parameter has a hook of ``register_post_accumulate_grad_hook`` that frees its gradient, in all columns: torch's recipe for an
optimizer in the backward, without the optimizer.  `eager` and `torch.compile` are torch's own, `end` and `early` are ours at
`memory_budget="min"`.  `error` is the largest difference of a gradient from eager mode's or plain torch.compile's, whichever is
nearer, as a part of the largest number in it: through the norms of a ResNet these two differ by 1 % themselves.
`asked` is the peak that `early` was to reach.  The exit status is 1 if a peak is above it, above what the plan says by more
than 1 %, or an error above `TOLERANCE`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.common import harness
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.harness import MIB, Training, mib
from benchmarks.common.runner import fresh_state
from benchmarks.models import Case, chains

ASKED = {"linear20": 5.5, "relu1024": 6.0, "chain256": 21.0, "gpt": 36.0}
"""Peaks in MiB that `early` is to reach, for models of full size."""

OTHERS = ("chain1024", "resnet", "llama", "vit")
"""More of the README's models, those without dropout: its random numbers differ from eager mode's."""

TOLERANCE = 1e-4
"""Largest allowed error: float32 rounds to 6e-8, and 100 layers round a thousand times."""

OF_PREDICTION = 0.01
TITLES = ("model", "eager", "torch.compile", "min, end", "min, early", "predicted", "asked", "error", "verdict")


@dataclass(frozen=True)
class FloorRow:
    """One model: peaks in bytes, and the largest relative error of a gradient."""

    model: str
    eager_bytes: int
    plain_bytes: int
    end_bytes: int
    early_bytes: int
    predicted_bytes: int
    asked_mib: float | None
    error: float

    @property
    def verdict(self) -> str:
        if self.asked_mib is not None and self.early_bytes > self.asked_mib * MIB:
            return "miss: above what was asked"
        if self.early_bytes > (1 + OF_PREDICTION) * self.predicted_bytes:
            return "miss: above the plan"
        return "ok" if self.error <= TOLERANCE else "miss: gradients differ"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    head = harness.header("cpu")
    harness.print_header(head)
    rows = list[FloorRow]()
    with private_compile_caches():
        for name in arguments.model or (*ASKED, *OTHERS):
            rows.append(row_of(name, arguments))
            harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    return int(any(row.verdict != "ok" for row in rows))


def table(rows: Sequence[FloorRow]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Titles and cells."""
    cells = [
        [
            row.model,
            *(mib(b) for b in (row.eager_bytes, row.plain_bytes, row.end_bytes, row.early_bytes, row.predicted_bytes)),
            "-" if row.asked_mib is None else f"{row.asked_mib:g}",
            f"{row.error:.1e}",
            row.verdict,
        ]
        for row in rows
    ]
    return TITLES, cells


def row_of(name: str, arguments: argparse.Namespace) -> FloorRow:
    """Compile and measure one model in each of the four ways."""
    import compile_remat

    peaks = {}
    for setting, make in _ways().items():
        harness.progress(f"{name}: {setting}")
        fresh_state("remat")
        run = make(_case(name, arguments))
        _free_gradients(run.module)
        run.step()
        peaks[setting] = harness.second_step_peak(run, "cpu").peak_bytes
    predicted_bytes = compile_remat.reports()[-1].predicted_peak_bytes or 0
    fresh_state("remat")
    found = _gradients(_ways()["early"](_case(name, arguments)))
    expected = [_gradients(_ways()[way](_case(name, arguments))) for way in ("eager", "plain")]
    error = max(min(_error(found[key], each[key]) for each in expected) for key in found)
    asked = None if arguments.toy else ASKED.get(name)
    return FloorRow(name, peaks["eager"], peaks["plain"], peaks["end"], peaks["early"], predicted_bytes, asked, error)


def _ways() -> dict[str, Callable[[Case], Training]]:
    return {
        "eager": lambda case: Training(case.module, case.module, case.inputs),
        "plain": harness.plain,
        "end": lambda case: harness.remat(case, "min"),
        "early": lambda case: harness.remat(case, "min", gradients="early"),
    }


def _free_gradients(module: nn.Module) -> None:
    def free(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(free)


def _gradients(run: Training) -> dict[str, Tensor]:
    """The gradients of one step, as hooks see them."""
    found: dict[str, Tensor] = {}
    for name, parameter in run.module.named_parameters():

        def note(parameter: Tensor, name: str = name) -> None:
            assert name not in found, "a hook has run twice"
            assert parameter.grad is not None
            found[name] = parameter.grad
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(note)
    run.step()
    return found


def _error(found: Tensor, expected: Tensor) -> float:
    largest = expected.abs().max()
    return float((found - expected).abs().max() / largest) if largest else float(found.abs().max())


def _case(name: str, arguments: argparse.Namespace) -> Case:
    scale = harness.scale_of(arguments)
    if name in models.CASES:
        return models.build(name, scale=scale, seed=arguments.seed)
    torch.manual_seed(arguments.seed)
    module, inputs = {"linear20": chains.linear20, "relu1024": chains.relu1024}[name](scale)
    return Case(name, module, inputs, "")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", action="append", choices=[*ASKED, *OTHERS], help="may be repeated; default all")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
