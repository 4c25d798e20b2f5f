"""Gradients of convolutional models against float64: plain's, ours, and ours without each rewrite.

    python -m benchmarks.conv_gradients [--device cuda] [--compiler eager] [--model resnet] [--dtype float32] [--toy] [--json OUT]

Each model takes one step from random weights, in one type, under each setting; the truth is the gradient of the same weights and
inputs in float64.  `error` is the norm of the difference from it over its norm, of all parameters together; `ratio` is ours over
plain's, or over 2 ulp of the norm where that is larger, and `worst` the largest such ratio of a single parameter.  ok: over the
seeds the median ratio is at most 1.5, the largest 3.  `eager` and `torch 0.5`, which are no plans of ours, are there to compare.

`forward` and `backward` say what rounding does to a model, whatever program computes it: the relative change of the gradients, in
float64, where the output of every layer, or the gradient of it, is changed at random by up to the type's unit roundoff.  About as
large is the error of *any* program in that type.  A ReLU whose input changes its sign changes a gradient by all of it, so that this
is no multiple of the roundoff: it goes more like its root.

On a GPU each setting runs with TF32 off and on, and with cuDNN's own choice of an algorithm, its benchmark, and deterministic ones.
About a minute: `--device cuda --compiler eager --setting "no rewrites" --setting split --setting all --seeds 2 --seconds 60`.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.common import harness
from benchmarks.common.compile_caches import without_graph_caches
from benchmarks.common.torch_budget import torch_activation_budget
from benchmarks.models import normed
from compile_remat.backend import remat
from compile_remat.passes.graph import rewrite_list

SEEDS = 5
MEDIAN_LIMIT, WORST_LIMIT = 1.5, 3.0
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "TF32": 2.0**-12}
"""Largest relative change of a number that is rounded to nearest."""

SEARCH_S = 0.2
"""Counted seconds of search for each plan: the quality of plans is not the point here."""

SPLIT, LAYOUT, ORDER = "split", "layout", "order"
REWRITES: dict[str, tuple[str, ...]] = {
    SPLIT: ("split_convolution_gradients",),
    LAYOUT: ("lay_gradients_out_once",),
    ORDER: ("separate_sigmoids", "move_weight_gradients_up", "make_sibling_gradients_together"),
}
"""The rewrites that can be switched off, by names of `rewrite_list.REWRITES`."""

PLAIN = "plain"
RIVALS = (PLAIN, "eager", "torch 0.5")
OURS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no rewrites": ("min", ()),
    "split": ("min", (SPLIT,)),
    "split, layout": ("min", (SPLIT, LAYOUT)),
    "order": ("min", (ORDER,)),
    "all": ("min", (SPLIT, LAYOUT, ORDER)),
    "all, 0.5": ("0.5", (SPLIT, LAYOUT, ORDER)),
    "all, max": ("max", (SPLIT, LAYOUT, ORDER)),
}
"""Settings of ours: a budget and the rewrites that are on."""

LIBRARY: dict[str, dict[str, bool]] = {
    "": {},
    "TF32": {"allow_tf32": True},
    "benchmark": {"benchmark": True},
    "deterministic": {"deterministic": True},
}
"""Choices of cuDNN, all others off."""

TITLES = ("model", "dtype", "cuDNN", "setting", "seed", "error", "plain's", "ratio", "worst", "forward", "backward")


@dataclass(frozen=True)
class GradientRow:
    """One step under one setting.

    Attributes:
        error: Norm of the difference from float64's gradients over the norm of these.
        from_plain: Norm of the difference from plain's gradients over the norm of these.
        ratio: The error over plain's error, or over 2 ulp if plain's error is less.
        worst: The largest such ratio of a single parameter.
        forward: Relative change of the gradients where each layer's output is changed by the type's roundoff.
        backward: The same for the gradients of each layer's output.
    """

    model: str
    dtype: str
    library: str
    setting: str
    seed: int
    error: float
    plain_error: float
    from_plain: float
    ratio: float
    worst: float
    forward: float
    backward: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--compiler", choices=("inductor", "eager"), default="inductor", help="for plain and ours")
    parser.add_argument("--model", action="append", choices=tuple(normed.FULL), help="may be repeated; default all")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="default both")
    parser.add_argument("--setting", action="append", choices=(*RIVALS, *OURS), help="default all; plain always runs")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no model is begun after these")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    is_cuda = torch.device(arguments.device).type == "cuda"
    rows, start = list[GradientRow](), time.monotonic()
    for model in arguments.model or normed.FULL:
        for dtype in arguments.dtype or ("float32", "bfloat16"):
            if time.monotonic() - start > arguments.seconds:
                harness.progress(f"{model} {dtype}: no time left")
                continue
            harness.progress(f"{model} {dtype}")
            rows += rows_of(model, dtype, tuple(LIBRARY) if is_cuda else ("",), arguments)
            harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(TITLES, [_cells(row) for row in rows]))
    found = verdicts(rows)
    print("\n".join(found))
    return int(any("miss" in line for line in found))


@contextmanager
def _told(library: str) -> Iterator[None]:
    """Sets the named choice of cuDNN and turns all others off, also TF32, which torch has on for convolutions by default."""
    flags = {"enabled": True, "benchmark": False, "deterministic": False, "allow_tf32": False, **LIBRARY[library]}
    with torch.backends.cudnn.flags(**flags):
        yield


# -- one model --------------------------------------------------------------------------------------------------------


def rows_of(model: str, dtype: str, libraries: Sequence[str], arguments: argparse.Namespace) -> list[GradientRow]:
    """A row for each setting, choice of the library and seed; code that is compiled once runs under each choice."""
    wanted = [s for s in (*RIVALS, *OURS) if s == PLAIN or not arguments.setting or s in arguments.setting]
    starts = [_start(model, dtype, seed, arguments) for seed in range(arguments.seed, arguments.seed + arguments.seeds)]
    exact = [_in_float64(*start) for start in starts]
    rows, plain, known = list[GradientRow](), dict[str, list[list[Tensor]]](), dict[str, list[list[float]]]()
    for library in libraries:
        roundoff = ROUNDOFF["TF32" if library == "TF32" and dtype == "float32" else dtype]
        known[library] = [
            [_change(*start, true, roundoff, in_backward=in_backward) for in_backward in (False, True)]
            for start, true in zip(starts, exact, strict=True)
        ]
    for setting in wanted:
        with _under(setting, arguments.compiler) as compiled:
            call = compiled(starts[0][0])
            for library in libraries:
                with _told(library):
                    found = _gradients(call, starts)
                base = plain.setdefault(library, found)
                for k, figures in enumerate(zip(found, base, exact, known[library], strict=True)):
                    rows.append(_row((model, dtype, library, setting, arguments.seed + k), *figures))
    return rows


def _row(
    names: tuple[str, str, str, str, int],
    ours: list[Tensor],
    base: list[Tensor],
    true: list[Tensor],
    changes: list[float],
) -> GradientRow:
    error, plain_error, ulp = _distance(ours, true), _distance(base, true), 2 * torch.finfo(ours[0].dtype).eps
    each = [_distance([o], [t]) / max(_distance([b], [t]), ulp) for o, b, t in zip(ours, base, true, strict=True)]
    ratio = error / max(plain_error, ulp)
    return GradientRow(*names, error, plain_error, _distance(ours, base), ratio, max(each), *changes)


Start = tuple[nn.Module, tuple[Tensor, Tensor]]


def _start(model: str, dtype: str, seed: int, arguments: argparse.Namespace) -> Start:
    torch.manual_seed(seed)
    module = (normed.TOY if arguments.toy else normed.FULL)[model]().train()
    batch, size = (4, 32) if arguments.toy else (16, 64)
    x, labels = torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))
    kind = getattr(torch, dtype)
    return module.to(arguments.device, kind), (x.to(arguments.device, kind), labels.to(arguments.device))


def _in_float64(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    return _gradients_of(*_doubled(module, inputs))


def _doubled(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> Start:
    return copy.deepcopy(module).double(), (inputs[0].double(), inputs[1])


def _gradients_of(
    call: Callable[..., Tensor], inputs: tuple[Tensor, Tensor], module: nn.Module | None = None
) -> list[Tensor]:
    owner = module if module is not None else call
    assert isinstance(owner, nn.Module)
    owner.zero_grad()
    call(*inputs).backward()
    return [parameter.grad.clone() for parameter in owner.parameters() if parameter.grad is not None]


def _gradients(call: Callable[..., Tensor], starts: Sequence[Start]) -> list[list[Tensor]]:
    """Gradients of each start, computed by the first start's compiled module, whose parameters are overwritten."""
    module = starts[0][0]
    states = [{k: v.clone() for k, v in start[0].state_dict().items()} for start in starts]
    found = list[list[Tensor]]()
    for state, (_, inputs) in zip(states, starts, strict=True):
        module.load_state_dict(state)
        found.append(_gradients_of(call, inputs, module))
    module.load_state_dict(states[0])
    return found


def _distance(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """Norm of the difference over the norm of `true`."""
    difference = sum(float((f.double() - t.double()).square().sum()) for f, t in zip(found, true, strict=True))
    return float((difference / sum(float(t.double().square().sum()) for t in true)) ** 0.5)


# -- what rounding does to a model ------------------------------------------------------------------------------------


def _change(
    module: nn.Module, inputs: tuple[Tensor, Tensor], true: list[Tensor], part: float, *, in_backward: bool
) -> float:
    """Relative change of the gradients if each element of every layer's output, or of its gradient, changes by up to `part`."""
    module, inputs = _doubled(module, inputs)
    torch.manual_seed(1)

    def changed(value: Tensor) -> Tensor:
        return value * (1 + part * (2 * torch.rand_like(value) - 1))

    def change_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not in_backward:
            return output + (changed(output) - output).detach()
        if output.requires_grad:
            output.register_hook(changed)
        return output

    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(change_output)
    return _distance(_gradients_of(module, inputs), true)


# -- the settings -----------------------------------------------------------------------------------------------------


@contextmanager
def _under(setting: str, compiler: str) -> Iterator[Callable[[nn.Module], Callable[..., Tensor]]]:
    """Returns the function that compiles a module under a setting."""
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(without_graph_caches())
        if setting == "torch 0.5":
            stack.enter_context(torch_activation_budget(0.5))
        if setting == "eager":
            yield lambda module: module
        elif setting in RIVALS:
            backend = "inductor" if compiler == "inductor" else "aot_eager_decomp_partition"
            yield lambda module: torch.compile(module, backend=backend)
        else:
            budget, rewrites = OURS[setting]
            off = {function for name, functions in REWRITES.items() if name not in rewrites for function in functions}
            on = tuple(rewrite for rewrite in rewrite_list.REWRITES if rewrite.name not in off)
            stack.enter_context(mock.patch.object(rewrite_list, "REWRITES", on))
            options: dict[str, Any] = {"memory_budget": budget, "compiler": compiler, "time_limit": SEARCH_S}
            yield lambda module: torch.compile(module, backend=remat, options=options)


# -- the verdict ------------------------------------------------------------------------------------------------------


def verdicts(rows: Sequence[GradientRow]) -> list[str]:
    """A line for each model, type, choice of the library and setting of ours."""
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for row in rows:
        if row.setting not in RIVALS:
            groups.setdefault((row.model, row.dtype, row.library, row.setting), []).append(row.ratio)
    lines = []
    for names, ratios in groups.items():
        median, worst = statistics.median(ratios), max(ratios)
        is_ok = median <= MEDIAN_LIMIT and worst <= WORST_LIMIT
        lines.append(
            f"{'ok' if is_ok else 'miss'}: {', '.join(filter(None, names))}: median {median:.2f}, worst {worst:.2f}"
        )
    return lines


MEDIAN_TITLES = ("model", "dtype", "setting", "error", "of plain", "ratio", "highest", "forward", "backward")


def medians(rows: Sequence[GradientRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles, and a line for each model, type and setting: medians over the seeds, and the highest ratio."""
    groups: dict[tuple[str, str, str], list[GradientRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.dtype, row.setting), []).append(row)
    lines = []
    for names, group in groups.items():
        fields = ("error", "plain_error", "ratio", "forward", "backward")
        error, plain, ratio, *changes = (statistics.median(getattr(row, field) for row in group) for field in fields)
        highest = max(row.ratio for row in group)
        figures = [
            f"{error:.1e}",
            f"{plain:.1e}",
            f"{ratio:.2f}",
            f"{highest:.2f}",
            *(f"{value:.1e}" for value in changes),
        ]
        lines.append([*names, *figures])
    return MEDIAN_TITLES, lines


def _cells(row: GradientRow) -> list[str]:
    figures = row.error, row.plain_error, row.ratio, row.worst, row.forward, row.backward
    return [
        row.model,
        row.dtype,
        row.library or "-",
        row.setting,
        str(row.seed),
        *(f"{value:.2g}" for value in figures),
    ]


if __name__ == "__main__":
    sys.exit(main())
