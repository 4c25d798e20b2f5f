"""What the literature on planning memory reports, rebuilt, with our plan beside it under our cost model of the same device.

    python -m benchmarks.published [--network resnet50] [--json OUT]

Nothing is compiled and nothing runs.  `published` is a point of the source: bytes on the device, parameters and inputs included,
and its time over the same source's training without a plan.  `ours at its peak` is what our plan takes within those bytes, over
our fastest plan; `ours at its time` is the lowest peak of ours that takes no longer than the published point.  `eager` checks what
was rebuilt: the peak of the network in eager mode, counted on tensors without data by torch's own memory tracker, beside the peak
that the source reports without a plan.  A point that is faster than its own baseline has faster kernels, not a better plan, and
cannot be compared in time.  The exit status is 1 where ours is worse on a row that can be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.common import harness
from benchmarks.common.harness import percent
from benchmarks.models import published as networks
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import bytes_of_model
from compile_remat.forecast.target_step import Target, step_of
from compile_remat.passes import Plan, Planner, frontier

GIB = 1 << 30
BUDGETS = 40
"""Between the lowest peak and the fastest plan's: the grain of "ours at its time"."""

MONET = "MONeT (Shah and others, ICLR 2021), tables of its README; torch 1.5.1, a P100 of 16 GB"


@dataclass(frozen=True)
class Record:
    """One network of one source.

    Attributes:
        build: Rebuilds it at the source's batch.
        baseline_gib: Its peak without a plan, as reported.
        points: Peak in GiB and time over the baseline's, as reported.
        remark: What could not be rebuilt, or differs.
    """

    source: str
    build: Callable[[], networks.Built]
    device: str
    baseline_gib: float
    points: tuple[tuple[float, float], ...]
    remark: str = ""


RECORDS = {
    "resnet50": Record(
        MONET,
        networks.resnet50,
        "p100",
        15.06,
        ((10.01, 0.0322), (9.01, 0.0468), (8.01, 0.0556), (6.99, 0.0728), (6.00, 0.0931), (4.99, 0.1195)),
    ),
    "googlenet": Record(
        MONET,
        networks.googlenet,
        "p100",
        14.93,
        ((9.98, 0.0713), (8.99, 0.0787), (8.01, 0.0844), (7.02, 0.0971), (6.01, 0.1214), (4.99, 0.1577)),
        "without the two side classifiers",
    ),
    "unet": Record(
        MONET,
        networks.unet,
        "p100",
        14.32,
        ((10.01, -0.0410), (9.01, -0.0207), (8.02, -0.0009), (7.00, 0.0139), (6.01, 0.0495), (5.01, 0.1151)),
    ),
    "mobilenet_v2": Record(
        MONET,
        networks.mobilenet_v2,
        "p100",
        14.46,
        ((10.02, 0.0240), (9.01, 0.0310), (8.02, 0.0477), (7.01, 0.0553), (6.01, 0.0755), (5.01, 0.0872)),
        "eager mode of today's torch keeps what ReLU6 reads, that of 1.5.1 what it writes",
    ),
    "vgg16": Record(
        MONET,
        networks.vgg16,
        "p100",
        14.12,
        ((9.71, -0.0530), (8.66, -0.0464), (7.88, -0.0218), (6.82, 0.0199), (5.90, 0.0544), (5.51, 0.0911)),
        "cuDNN's workspaces are in the reported bytes",
    ),
}


@dataclass(frozen=True)
class PublishedRow:
    """One point of one network.

    Attributes:
        published_bytes, published_extra: As reported; the time is a part of the source's own baseline.
        baseline_bytes: As reported without a plan.
        eager_bytes: The same for what was rebuilt.
        fastest_bytes, floor_bytes: Of our fastest plan and our lowest one, parameters and inputs included.
        extra: Of our plan within the published bytes; None where none fits.
        bytes_at_its_time: The lowest of ours that takes no longer than the published point; None where that is below zero.
    """

    network: str
    source: str
    device: str
    remark: str
    published_bytes: int
    published_extra: float
    baseline_bytes: int
    eager_bytes: int
    fastest_bytes: int
    floor_bytes: int
    extra: float | None
    bytes_at_its_time: int | None

    @property
    def verdict(self) -> str:
        """Empty where ours is no worse, or where the point cannot be compared."""
        if self.extra is None:
            return f"no plan of ours fits; the lowest takes {_gib(self.floor_bytes)}"
        if self.published_extra >= 0 and self.extra > self.published_extra + 0.0005:
            return f"{percent(self.extra - self.published_extra)} of the step slower"
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser("the published record beside ours")
    parser.add_argument("--network", action="append", choices=list(RECORDS), help="may be repeated; default all")
    arguments = parser.parse_args(argv)
    head = harness.header(arguments.device)
    harness.print_header(head)
    rows: list[PublishedRow] = []
    for name in arguments.network or RECORDS:
        harness.progress(f"{name}: planning")
        rows += rows_of(name, RECORDS[name])
        harness.write_json(arguments.json, head, rows)
    print(harness.ascii_table(*table(rows)))
    print(summary(rows))
    return int(any(row.verdict for row in rows))


def rows_of(name: str, record: Record) -> Iterator[PublishedRow]:
    """All points of one network."""
    builder = Builder(record.build, dtype="fp32")
    parameter_bytes, _, input_bytes = bytes_of_model(builder)
    fixed = parameter_bytes + input_bytes
    planner = Planner(step_of(builder, Target(record.device)).problem)
    fastest = planner.fastest()
    plans = [*frontier(planner, BUDGETS), fastest]
    eager = eager_peak_bytes(record.build)
    peaks = [round(peak_gib * GIB) for peak_gib, _ in record.points]
    within = [planner.within(peak - fixed) for peak in peaks]
    lowest = min(plan.peak_bytes for plan in (planner.lowest(), *plans, *within))
    for peak, plan, (_, published) in zip(peaks, within, record.points, strict=True):
        yield PublishedRow(
            network=name,
            source=record.source,
            device=record.device,
            remark=record.remark,
            published_bytes=peak,
            published_extra=published,
            baseline_bytes=round(record.baseline_gib * GIB),
            eager_bytes=eager,
            fastest_bytes=fastest.peak_bytes + fixed,
            floor_bytes=lowest + fixed,
            extra=plan.extra_time_ns / plan.step_time_ns if plan.is_feasible else None,
            bytes_at_its_time=None if published < 0 else lowest_within_time([*plans, *within], published) + fixed,
        )


def lowest_within_time(plans: Sequence[Plan], extra: float) -> int:
    """The lowest peak of the plans that take no more than `extra` of the step."""
    return min(
        plan.peak_bytes for plan in plans if plan.is_feasible and plan.extra_time_ns <= extra * plan.step_time_ns
    )


def eager_peak_bytes(build: Callable[[], networks.Built]) -> int:
    """The most that a training step in eager mode holds, parameters and inputs included; tensors have no data."""
    with FakeTensorMode():
        module, inputs = build()
        tracker = MemTracker()
        tracker.track_external(module)
        with tracker:
            _step(module, inputs)
            tracker.reset_mod_stats()
            _step(module, inputs)  # gradients of the first are still there, as in a training loop
        peak = tracker.get_tracker_snapshot("peak")
    return int(sum(figures["Total"] for device, figures in peak.items() if device.type == "cpu"))


def _step(module: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    module(*inputs).backward()


# -- what they show -----------------------------------------------------------------------------------------------------

TITLES = (
    "network", "baseline", "eager", "our fastest", "our lowest", "its peak", "its time", "ours at its peak",
    "ours at its time", "note",
)  # fmt: skip


def table(rows: Sequence[PublishedRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Titles and cells: GiB, and times as parts of the step without a plan."""
    return TITLES, [
        [
            row.network,
            _gib(row.baseline_bytes),
            _gib(row.eager_bytes),
            _gib(row.fastest_bytes),
            _gib(row.floor_bytes),
            _gib(row.published_bytes),
            f"{row.published_extra:+.1%}",
            "-" if row.extra is None else f"{row.extra:+.1%}",
            "-" if row.bytes_at_its_time is None else _gib(row.bytes_at_its_time),
            row.verdict,
        ]
        for row in rows
    ]


def summary(rows: Sequence[PublishedRow]) -> str:
    """How many points are matched, and what could not be rebuilt."""
    compared = [row for row in rows if row.published_extra >= 0]
    worse = [row for row in compared if row.verdict]
    lines = [f"points that can be compared in time: {len(compared)} of {len(rows)}; ours is worse on {len(worse)}"]
    ratios = [row.bytes_at_its_time / row.published_bytes for row in compared if row.bytes_at_its_time is not None]
    if ratios:
        lines.append(
            f"our peak at the published time over the published one: geometric mean {geometric_mean(ratios):.2f}"
        )
    remarks = dict.fromkeys((row.network, row.remark) for row in rows if row.remark)
    return "\n".join(lines + [f"{network}: {remark}" for network, remark in remarks])


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"


if __name__ == "__main__":
    sys.exit(main())
