"""Predicted against measured times of the steps that were measured on an H200, by family of kernels.

    python -m benchmarks.gpu_prices [--prices h200]
    python -m benchmarks.gpu_prices --plan gpt --plan llama --plan resnet50

The first command reads what is committed, `benchmarks/results/gpu_h200`, and takes a second.  `work.json` there has the work of
each point whose kernels were measured, node by node: the counts that the cost model prices.  The second command makes that file: it
traces and plans each model at full size, in a few minutes, without a GPU.

A family's predicted time is at the clock of a burst and without launches, as the profiler measured it in one step after a pause;
a step's is in a steady state, with a launch for each kernel.  The columns of families have the error of the predicted time; "extra"
is the step beyond plain's, as a part of plain's.

Plans of today are not those that ran.  So a point's plan is one of today's frontier, under the prices that it was planned with,
that runs as many products and attentions as were measured, or nearly; torch's choice is the installed torch's, for the attention
operators that ran.  "products" says how many the plan runs and how many ran.  Eager mode has no plan and is left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.common import harness
from benchmarks.models.large import LARGE, build_large, checkpointed
from compile_remat._torch import cuda_sdpa
from compile_remat._torch.fake import NumbersAreZero, fake_tensors
from compile_remat.cost_models import Device, Op, OpKind, Roofline, load_device
from compile_remat.cost_models.device.description import GPU_EFFICIENCY, GPU_HALF_SIZES
from compile_remat.forecast import fake_trace
from compile_remat.forecast.target_step import Ready, Target, ready_on
from compile_remat.passes import Plan, Problem
from compile_remat.passes.graph import build, pricing
from compile_remat.passes.graph.pricing import Work, Works, works_of

RESULTS = Path(__file__).parent / "results" / "gpu_h200"
WORK = RESULTS / "work.json"
PLANNED_WITH = RESULTS / "device.json"
"""The device whose prices the measured plans were made with."""

PRODUCTS, ATTENTION, FUSED = FAMILIES = ("products", "attention", "fused")
_FAMILY = {OpKind.MATMUL: PRODUCTS, OpKind.CONV: PRODUCTS, OpKind.ATTENTION: ATTENTION}
_ATTENTION_NAMES = ("sdpa", "cudnn::fusion")
_FUSED_NAMES = ("triton_", "Mem", "at::native")

SHARE = 4
"""The measured batch was one of so many parts."""

PLAIN = "plain default"
Counts = Mapping[Work, int]


@dataclass(frozen=True)
class Row:
    """A point: measured and predicted times in ns, of the step and of each family, and launches.

    Attributes:
        extra, predicted_extra: Step beyond plain's, as a part of plain's; None if plain's kernels were not measured.
    """

    model: str
    point: str
    step_ns: int
    predicted_step_ns: int
    family_ns: Mapping[str, int]
    predicted_family_ns: Mapping[str, int]
    launches: Mapping[str, int]
    predicted_launches: Mapping[str, int]
    extra: float | None = None
    predicted_extra: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the predicted step."""
        return self.predicted_step_ns / self.step_ns - 1

    def family_error(self, family: str) -> float:
        """Relative error of a family's predicted time; 0 if it has none."""
        return self.predicted_family_ns[family] / self.family_ns[family] - 1 if self.family_ns[family] else 0.0


def rows(device: Device) -> list[Row]:
    """All points with kernels under the prices of a device."""
    found = []
    for model, points in read_work().items():
        first: Row | None = None
        for point, counts in points.items():
            row = _row(model, point, counts, device)
            first = row if point == PLAIN else first
            if first is not None:
                shares = row.step_ns / first.step_ns - 1, row.predicted_step_ns / first.predicted_step_ns - 1
                row = replace(row, extra=shares[0], predicted_extra=shares[1])
            found.append(row)
    return found


def with_default_figures(device: Device) -> Device:
    """The device as the table has those that nobody measured."""
    return replace(device, efficiency=GPU_EFFICIENCY, half_sizes=GPU_HALF_SIZES)


def _row(model: str, point: str, counts: Counts, device: Device) -> Row:
    burst = Roofline(replace(device, launch_ns=0, launches_ns=(), sustained_clock_ratio=1.0))
    steady = Roofline(device)
    families, launches = Counter[str](), Counter[str]()
    for work, count in counts.items():
        families[family_of(work)] += count * work.time_ns(burst)
        launches[family_of(work)] += count * (work.is_alone or work.is_written)
    step_ns = sum(count * work.time_ns(steady) for work, count in counts.items())
    measured_ns, measured = measured_kernels(model, point)
    return Row(model, point, measured_step_ns(model, point), step_ns, measured_ns, families, measured, launches)


def family_of(work: Work) -> str:
    """The family that a node's time counts to: its own kernel's, or fused."""
    return _FAMILY.get(work.op.kind, FUSED) if work.op is not None and work.is_alone else FUSED


def measured_kernels(model: str, point: str) -> tuple[Counter[str], Counter[str]]:
    """Measured ns, and launches, of each family."""
    times_ns, launches = Counter[str](), Counter[str]()
    for name, time_ns, count in _json(RESULTS / f"{model}.kernels.json")[point]:
        family = PRODUCTS
        if any(part in name for part in _ATTENTION_NAMES):
            family = ATTENTION
        elif any(part in name for part in _FUSED_NAMES):
            family = FUSED
        times_ns[family] += time_ns
        launches[family] += count
    return times_ns, launches


def measured_step_ns(model: str, point: str) -> int:
    """The measured median time of a step."""
    return next(int(p["step_ns"]) for p in _json(RESULTS / f"{model}.json")["points"] if _name(p) == point)


def _name(point: Mapping[str, Any]) -> str:
    return f"{point['kind']} {point['setting']}"


@cache
def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prices", default="h200", metavar="DEVICE", help="a name of the table or a file (default h200)"
    )
    parser.add_argument("--plan", action="append", choices=list(LARGE), help="trace and plan anew; may be repeated")
    arguments = parser.parse_args(argv)
    for model in arguments.plan or ():
        write_work(model, work_of(model))
    print(harness.ascii_table(TITLES, [_cells(row) for row in rows(load_device(arguments.prices))]))
    return 0


TITLES = ("model", "point", "step ms", "measured", "error", *FAMILIES, "extra", "measured", "products", "measured")


def _cells(row: Row) -> tuple[str, ...]:
    figures = [row.error, *(row.family_error(family) if row.family_ns[family] else None for family in FAMILIES)]
    signed = ["-" if figure is None else f"{figure:+.1%}" for figure in figures]
    extras = [harness.percent(share) for share in (row.predicted_extra, row.extra)]
    products = [str(launches[PRODUCTS]) for launches in (row.predicted_launches, row.launches)]
    steps = [f"{time_ns / 1e6:.1f}" for time_ns in (row.predicted_step_ns, row.step_ns)]
    return (row.model, row.point, *steps, *signed, *extras, *products)


# -- the file of work -----------------------------------------------------------------------------------------------------


def read_work() -> dict[str, dict[str, Counts]]:
    """The work of each point of each model: how often each piece runs in a step."""
    found: dict[str, dict[str, Counts]] = {}
    for model, content in _json(WORK).items():
        works = [_work(fields) for fields in content["work"]]
        found[model] = {p: {works[k]: n for k, n in counts} for p, counts in content["points"].items()}
    return found


def _work(fields: Mapping[str, Any]) -> Work:
    op = fields.get("op")
    if op is not None:
        product = op.get("product")
        op = Op(
            **{**_OP, **op, "kind": OpKind(op["kind"]), "product": None if product is None else tuple(product)},
        )
    return Work(**{**fields, "op": op})


_OP = {"name": "", "is_random": False, "estimated": False}


def write_work(model: str, points: Mapping[str, Counts]) -> None:
    """Write the work of a model's points, in place of what the file has of it."""
    works = sorted({work for counts in points.values() for work in counts}, key=repr)
    places = {work: k for k, work in enumerate(works)}
    content = {
        "work": [_fields(work) for work in works],
        "points": {p: sorted([places[work], n] for work, n in counts.items()) for p, counts in points.items()},
    }
    known = _json(WORK) if WORK.exists() else {}
    lines = []
    for name, each in sorted({**known, model: content}.items()):
        texts = ",\n".join(json.dumps(work) for work in each["work"])
        points_text = ",\n".join(f"{json.dumps(p)}: {json.dumps(counts)}" for p, counts in each["points"].items())
        lines.append(f'{json.dumps(name)}: {{"work": [\n{texts}],\n"points": {{\n{points_text}}}}}')
    WORK.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    _json.cache_clear()


def _fields(work: Work) -> dict[str, Any]:
    """The fields that differ from their defaults; `_work` reads them back."""
    fields = {name: value for name, value in asdict(work).items() if value}
    if work.op is not None:
        own = {name: value for name, value in fields["op"].items() if name not in _OP and value is not None}
        fields["op"] = own if own["visible"] < 1 else {name: value for name, value in own.items() if name != "visible"}
    return fields


# -- planning at full size ------------------------------------------------------------------------------------------------


def work_of(model: str) -> dict[str, Counts]:
    """Trace and plan the points of a model whose kernels were measured."""
    points = [point for point in _json(RESULTS / f"{model}.json")["points"] if _has_plan(model, point)]
    found: dict[str, Counts] = {}
    for is_checkpointed in (False, True):
        chosen = [point for point in points if (point["kind"] == "checkpoint") == is_checkpointed]
        if not chosen:
            continue
        traced = _Traced(model, is_checkpointed=is_checkpointed)
        for point in chosen:
            harness.progress(f"{model}: {_name(point)}")
            found[_name(point)] = traced.counts(traced.saved(point))
    return {_name(point): found[_name(point)] for point in points}


def _has_plan(model: str, point: Mapping[str, Any]) -> bool:
    return point["kind"] != "eager" and bool(_json(RESULTS / f"{model}.kernels.json").get(_name(point)))


class _Traced:
    """The planning problem of a model's step at full size, with the work of its nodes."""

    def __init__(self, model: str, *, is_checkpointed: bool) -> None:
        self.model = model
        target, seen = Target(str(PLANNED_WITH)), list[Works]()
        budgets = [
            1.0,
            *(float(p["setting"]) for p in _json(RESULTS / f"{model}.json")["points"] if p["kind"] == "torch"),
        ]

        def price(values: Any, steps: Any, cost: Any) -> int:
            seen.append(works_of(values, steps, cost.cache_bytes))
            return pricing.price(values, steps, cost)

        with _cudnn_attention(), mock.patch.object(build, "price", price):
            built = _built(model, is_checkpointed=is_checkpointed)
            builder: Any = SimpleNamespace(name=model)
            traced = fake_trace.trace(builder, target.figures(), model=built)
            self.ready: Ready = ready_on(traced, target, torch_budgets=tuple(budgets))
        works = seen[-1]
        self.once = Counter(_unnamed(work) for work in works.once.values())
        self.again = {draft.node.name: _unnamed(work) for draft, work in works.again.items()}
        self.saving = {draft.node.name: saving for draft, saving in works.saving.items()}
        sets = (self.ready.prepared.builder.saved_by(nodes, self.problem) for nodes in self.ready.prepared.torch_sets)
        self.torchs = dict(zip(budgets, sets, strict=True))

    @property
    def problem(self) -> Problem:
        return self.ready.problem

    def saved(self, point: Mapping[str, Any]) -> frozenset[int]:
        """Indices of the values that a point saves."""
        if point["kind"] != "remat" or point["setting"] == "max":  # `max` ran plain's kernels, all 852 of them
            return frozenset(self.torchs[float(point["setting"]) if point["kind"] == "torch" else 1.0])
        return self._with_attention(self._of(self._alike(point)), _name(point))

    def _of(self, plan: Plan) -> frozenset[int]:
        names = set(plan.saved)
        return frozenset(i for i, value in enumerate(self.problem.values) if value.name in names)

    def _alike(self, point: Mapping[str, Any]) -> Plan:
        """The plan of the measured budget, or the nearest above or below it that runs as many products as the measured one."""
        measured = measured_kernels(self.model, _name(point))[1][PRODUCTS]
        planner, budget_bytes = self.ready.planner, point["budget_bytes"]
        first = planner.lowest() if budget_bytes is None else planner.within(budget_bytes)
        tried = [first]
        low, high = first.peak_bytes / REACH, first.peak_bytes * REACH
        budget = float(first.peak_bytes)
        while len(tried) < TRIES and (products := self._products(tried[-1])) != measured:
            low, high = (budget, high) if products > measured else (low, budget)  # more bytes, less to compute again
            budget = (low + high) / 2
            tried.append(planner.within(int(budget)))
        return min(tried, key=lambda plan: abs(self._products(plan) - measured))

    def _with_attention(self, saved: frozenset[int], point: str) -> frozenset[int]:
        """The saved values without the results of as many attentions as ran once more, the last ones first."""
        kernels = _json(RESULTS / f"{self.model}.kernels.json")[point]
        measured = sum(count for name, _, count in kernels if "fprop" in name and "sdpa" in name)
        values = self.problem.values
        heads = [i for i, v in enumerate(values) if family_of(self.again[v.name]) == ATTENTION]
        for head in reversed(heads):
            results = {i for i in saved if head in values[i].reads}
            missing = measured + len(heads) - launches_of(self.counts(saved))[ATTENTION]
            saved = saved - results if missing > 0 else saved
        return saved

    def _products(self, plan: Plan) -> int:
        return launches_of(self.counts(self._of(plan)))[PRODUCTS]

    def counts(self, saved: frozenset[int]) -> Counts:
        """The work of a step that saves these values, and computes the others that its backward reads again."""
        found, done = Counter(self.once), set[int]()
        stack = [v for step in self.problem.steps for v in step.reads]
        while stack:
            v = stack.pop()
            if v in done:
                continue
            done.add(v)
            value = self.problem.values[v]
            found.update(self.saving[value.name] if v in saved else (self.again[value.name],))
            stack += () if v in saved else value.reads
        return {work: count for work, count in found.items() if work != Work()}


def _unnamed(work: Work) -> Work:
    """The same work for equal nodes of all blocks, with cuDNN's attention inside checkpoints, too."""
    if work.op is None:
        return work
    target = work.op.target.replace("product_flash_attention", "product_cudnn_attention")
    return replace(work, op=replace(work.op, target=target, **_OP))


REACH, TRIES = 1.5, 10
"""The search for a plan with as many products as were measured tries at most `TRIES` budgets, which differ from the first
plan's peak by a factor of at most `REACH`."""


def launches_of(counts: Counts) -> Counter[str]:
    """Launches of each family."""
    found = Counter[str]()
    for work, count in counts.items():
        found[family_of(work)] += count * (work.is_alone or work.is_written)
    return found


def _built(model: str, *, is_checkpointed: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    with fake_tensors(), NumbersAreZero():
        case = build_large(model, device="cpu", share=1 / SHARE)
    case = checkpointed(case) if is_checkpointed else case
    return case.module, tuple(case.inputs)


@contextmanager
def _cudnn_attention() -> Iterator[None]:
    """Attention is cuDNN's, as torch 2.11 chose on the H200; torch's chooser treats it unlike flash attention."""

    def attend(q: Any, k: Any, v: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        return op(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]

    with mock.patch.object(cuda_sdpa, "_flash", attend):
        yield


if __name__ == "__main__":
    sys.exit(main())
