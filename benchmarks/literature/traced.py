"""Networks that are traced from modules: MONeT's, Rockmate's and HiRemate's, POFO's.  Nothing is compiled and nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.literature.planned import Network, Planned, Point
from benchmarks.literature.rows import Row
from benchmarks.models import hiremate
from benchmarks.models import published as networks
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import bytes_of_model
from compile_remat.forecast.target_step import Target, step_of

GIB = 1 << 30

CLAIM_BUDGETS = 12
"""Budgets of the frontier of a claim's networks, which no picture shows."""

Build = Callable[[], networks.Built]


@dataclass(frozen=True)
class Record:
    """One network whose bytes a source reports: all on the device, parameters and inputs included.

    Attributes:
        baseline_gib: Peak without a plan.
        points: Peak in GiB and time over the baseline's.
        remarks: Pairs (GiB, reason why our plan is worse below that peak).
    """

    build: Build
    baseline_gib: float
    points: tuple[tuple[float, float], ...]
    remarks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Claim:
    """Networks for which a source reports what part of the activations is left, at which time.

    Attributes:
        parts: Part of the activations and time over the baseline's.
        remarks: By network, the remark beside its rows.
    """

    source: str
    device: str
    networks: dict[str, Build]
    parts: tuple[tuple[float, float], ...]
    remarks: dict[str, str]


PACKED_MASK = "MONeT keeps a ReLU's signs as bits, ours its output until the gradient of the convolution below is there"

MONET = {
    "ResNet-50": Record(
        networks.resnet50,
        15.06,
        ((10.01, 0.0322), (9.01, 0.0468), (8.01, 0.0556), (6.99, 0.0728), (6.00, 0.0931), (4.99, 0.1195)),
    ),
    "GoogleNet": Record(
        networks.googlenet,
        14.93,
        ((9.98, 0.0713), (8.99, 0.0787), (8.01, 0.0844), (7.02, 0.0971), (6.01, 0.1214), (4.99, 0.1577)),
    ),
    "U-Net": Record(
        networks.unet,
        14.32,
        ((10.01, -0.0410), (9.01, -0.0207), (8.02, -0.0009), (7.00, 0.0139), (6.01, 0.0495), (5.01, 0.1151)),
    ),
    "MobileNetV2": Record(
        networks.mobilenet_v2,
        14.46,
        ((10.02, 0.0240), (9.01, 0.0310), (8.02, 0.0477), (7.01, 0.0553), (6.01, 0.0755), (5.01, 0.0872)),
    ),
    "VGG-16": Record(
        networks.vgg16,
        14.12,
        ((9.71, -0.0530), (8.66, -0.0464), (7.88, -0.0218), (6.82, 0.0199), (5.90, 0.0544), (5.51, 0.0911)),
        ((7.5, PACKED_MASK),),
    ),
}

FAILS = "HiRemate's own log (playground/stdout.txt) ends in an error for it"

ROCKMATE = Claim(
    "rockmate",
    "v100",
    {
        "GPT-2": hiremate.gpt2,
        "RegNetX-32GF": hiremate.regnet32,
        "ResNet-101": networks.resnet101,
        "UNO": hiremate.uno,
        "U-FNO": hiremate.ufno,
    },
    ((1 / 2, 0.10), (0.3, 0.15), (1 / 5, 0.20)),
    {"RegNetX-32GF": FAILS, "UNO": FAILS, "U-FNO": FAILS},
)
WITH_OFFLOAD = "theirs also moves activations to the host and back"
POFO = Claim(
    "pofo",
    "v100",
    {"ResNet-50": networks.large_resnet50, "ResNet-101": networks.large_resnet101},
    ((1 / 4, 0.20), (1 / 6, 0.20)),
    {"ResNet-50": WITH_OFFLOAD, "ResNet-101": WITH_OFFLOAD},
)
CLAIMS = {claim.source: claim for claim in (ROCKMATE, POFO)}


def record_rows(source: str, name: str, record: Record, device: str = "p100") -> Iterator[Row]:
    """All points of a network whose bytes are reported, and its frontier."""
    builder = Builder(record.build, dtype="fp32")
    parameter_bytes, _, input_bytes = bytes_of_model(builder)
    eager, baseline = eager_peak_bytes(record.build), round(record.baseline_gib * GIB)
    network = Network(source, name, device, baseline, eager, parameter_bytes + input_bytes)
    points = [
        Point(f"{gib:.2f} GiB", round(gib * GIB), extra, _remark(record.remarks, gib)) for gib, extra in record.points
    ]
    planned = Planned(network, step_of(builder, Target(device)).problem)
    yield from planned.rows(points)
    yield planned.frontier_row(points)


def _remark(remarks: Sequence[tuple[float, str]], gib: float) -> str:
    return next((text for below, text in remarks if gib < below), "")


def claim_rows(claim: Claim, name: str) -> Iterator[Row]:
    """Our plans within parts of the activations of eager mode: all on the device but parameters, their gradients, and inputs.

    Gradients lie there from the step before in eager mode; ours counts them as they are made, and their bytes are taken off whole.
    """
    build = claim.networks[name]
    builder = Builder(build, dtype="fp32")
    parameter_bytes, gradient_bytes, input_bytes = bytes_of_model(builder)
    activation_bytes = eager_peak_bytes(build) - parameter_bytes - gradient_bytes - input_bytes
    network = Network(claim.source, name, claim.device, activation_bytes, activation_bytes, -gradient_bytes)
    remark = claim.remarks.get(name, "")
    points = [
        Point(f"{part:.2f} of the activations", round(part * activation_bytes), extra, remark)
        for part, extra in claim.parts
    ]
    yield from Planned(network, step_of(builder, Target(claim.device)).problem, CLAIM_BUDGETS).rows(points)


def eager_peak_bytes(build: Build) -> int:
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
