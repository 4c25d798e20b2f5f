"""Measure the present device and fit the figures of the roofline model to it.

The figures are fitted one group after the other, each with the earlier groups fixed: memory, launches, products in the
first type, products in other types, attention, convolutions, the arithmetic of fused kernels, gathers and scatters.
The clock of a training step, which runs without a pause, is measured last, as a part of the clock of these short kernels.
The link of a GPU to its host is measured beside them.  Figures that are not measured (memory size, caches of GPUs) keep the values
of the device table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_remat._torch.offload.streams import HostCopyError
from compile_remat.cost_models.device.files import device_to_json
from compile_remat.cost_models.device.table import detect, device_names
from compile_remat.cost_models.operators.flops import element_weight
from compile_remat.cost_models.operators.kinds import OpKind
from compile_remat.cost_models.operators.ops import Op
from compile_remat.cost_models.roofline import Roofline
from compile_remat.cost_models.timing import microbenchmarks
from compile_remat.cost_models.timing.clock import clock_name
from compile_remat.cost_models.timing.fitting import Path, Point, Price, fit, model_of, put
from compile_remat.cost_models.timing.host_link import HostLink, measured_link
from compile_remat.cost_models.timing.interleaved import (
    SUSTAINED_NS,
    TOY_SUSTAINED_NS,
    TimedCase,
    clock_ratio,
    prepared,
    run_rounds,
)
from compile_remat.cost_models.timing.microbenchmarks import CHAIN, FUNCTIONS, POLYNOMIAL, Case

Say = Callable[[str], object]

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_LENGTHS = (0, 1, 2)
_START_LENGTHS = [8.0, 8.0, 16.0]
_SLOW = 0.02
"""Start of an arithmetic efficiency: so low that arithmetic outweighs traffic, else a change of it would change no price."""


@dataclass(frozen=True)
class Calibration:
    """A calibrated device as a JSON object, and the points that it was fitted to, in the order of the cases.

    Attributes:
        link: The link to the host; None for a CPU, or if the host has no memory for copies.
    """

    content: dict[str, Any]
    points: tuple[Point, ...]
    link: HostLink | None = None

    def model(self) -> Roofline:
        """The roofline model with the fitted figures, for kernels that run in bursts as the points did."""
        return model_of(self.content | {"sustained_clock_ratio": 1.0})


def calibrate(device: torch.device, seconds: float, say: Say, *, is_toy: bool = False) -> Calibration:
    """Measure all cases in interleaved rounds for about `seconds`, preparation not counted, and fit the figures.

    Args:
        say: Called with each line of progress.
        is_toy: If True, takes few cases with an eighth of the lengths: a smoke test whose figures mean nothing.
    """
    first, *others = dtypes_of(device)
    is_tf32 = "tf32" in dict(detect(device).flops_per_s)
    every = microbenchmarks.cases(device, first, others, is_tf32=is_tf32, is_toy=is_toy)
    timed = []

    def progress(count: int, passed: float) -> None:
        say(f"measuring: round {count}, {passed:.0f} of {seconds:.0f} s")

    with _float32_is_float32():
        for count, case in enumerate(every, start=1):
            say(f"preparing {count} of {len(every)}: {case.name}")
            timed.append(prepared(case))
        run_rounds(timed, device, seconds, progress)
        say("measuring without a pause")
        largest = microbenchmarks.sustained_case(device, first, is_toy=is_toy)
        ratio = clock_ratio(prepared(largest), device, TOY_SUSTAINED_NS if is_toy else SUSTAINED_NS)
    link = None
    if device.type != "cpu":
        say("copying to the host and back")
        try:
            link = measured_link(device, is_toy=is_toy)
        except HostCopyError as error:
            say(f"the link to the host keeps the figures of the device table: {error}")
    say("fitting")
    found = fitted(start_of(device), timed, sheet_of(device), ratio)
    return found if link is None else replace(found, content=found.content | link.figures(), link=link)


def dtypes_of(device: torch.device) -> list[torch.dtype]:
    """Dtypes of products to measure, that of training first: float32 on CPU; on a GPU a 16-bit dtype that it supports."""
    rates = dict(detect(device).flops_per_s)
    half = [dtype for dtype, name in _DTYPES.items() if name in rates]
    return [torch.float32, *half] if device.type == "cpu" else [*half, torch.float32]


@contextmanager
def _float32_is_float32() -> Iterator[None]:
    """Context in which TF32 is off for float32 convolutions and products; the user's settings are restored afterwards."""
    allowed, precision = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        torch.set_float32_matmul_precision(precision)


def start_of(device: torch.device) -> dict[str, Any]:
    """The start figures: those of the device table, with every efficiency 1 and, on a CPU, its own cache size."""
    known = replace(detect(device), efficiency=(("bandwidth", 1.0),), half_sizes=(), launches_ns=())
    if device.type == "cpu":
        known = replace(known, l2_bytes=_cpu_cache_bytes())
    return device_to_json(known)


def sources_of(device: torch.device, date: str) -> list[str]:
    """The sources of the figures, in words: hardware, torch version, date and clock of the measurement."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    text = f"measured by compile-remat calibrate on {device.type} ({hardware}), torch {torch.__version__}, {date}"
    return [f"{text}; {clock_name(device)}", "memory and other figures: the device table"]


def sheet_of(device: torch.device) -> dict[Path, float]:
    """The rates and the bandwidth of the device's data sheet; empty for a device of which the table has none, such as a CPU."""
    known = detect(device)
    if device.type == "cpu" or known.name not in device_names():
        return {}
    rates: dict[Path, float] = {("flops_per_s", dtype): rate for dtype, rate in known.flops_per_s}
    return {**rates, ("bandwidth_bytes_per_s",): known.bandwidth_bytes_per_s}


def fitted(
    start: Mapping[str, Any],
    cases: Sequence[TimedCase],
    sheet: Mapping[Path, float] | None = None,
    sustained_clock_ratio: float = 1.0,
) -> Calibration:
    """Fit the figures of `start` to the measured times, which are those of bursts.

    Args:
        sheet: Upper limits of figures: a fit to small kernels finds rates above the data sheet, and prices large ones too low.
        sustained_clock_ratio: The figure of that name, measured.
    """
    state = _State(dict(start) | {"sustained_clock_ratio": 1.0}, {}, {}, sheet or {})
    for timed in cases:
        state.cases.setdefault(timed.case.group, []).append(timed)
    _fit_memory(state)
    _fit_launches(state)
    _fit_products(state)
    _fit_heavy(state)
    _fit_depthwise(state)
    _fit_arithmetic(state)
    _fit_scatters(state)
    order = [timed.case.name for timed in cases]
    points = sorted(state.points.values(), key=lambda point: order.index(point.name))
    return Calibration(state.content | {"sustained_clock_ratio": sustained_clock_ratio}, tuple(points))


@dataclass
class _State:
    """The figures so far, the measured cases of each group, the points that have been fitted, and the data sheet's limits."""

    content: dict[str, Any]
    cases: dict[str, list[TimedCase]]
    points: dict[str, Point]
    sheet: Mapping[Path, float]

    def fit(self, paths: Sequence[Path], points: Iterable[Point], most: Mapping[Path, float] | None = None) -> None:
        """Fit figures; no rate exceeds the device's data sheet, and no efficiency its limit in `most`."""
        found = list(points)
        self.points.update((point.name, point) for point in found)
        self.content = fit(self.content, paths, found, {**self.sheet, **(most or {})})

    def start(self, figure: str, key: str, value: Any) -> None:
        self.content.setdefault(figure, {}).setdefault(key, value)

    def of(self, group: str, price: Callable[[Case], Price] | None = None) -> list[Point]:
        """Points of a group of cases, by default priced as unfused kernels that run one after the other."""
        found = self.cases.get(group, [])
        return [Point(timed.case.name, timed.median_ns, (price or _as_kernels)(timed.case)) for timed in found]

    def median_ns(self, group: str) -> float:
        return min(timed.median_ns for timed in self.cases[group])


def _as_kernels(case: Case) -> Price:
    ops = case.ops()
    return lambda model: float(sum(model.op_time_ns(op) for op in ops))


# -- the groups -------------------------------------------------------------------------------------------------------


def _fit_memory(state: _State) -> None:
    """Fit bandwidth and launch time to copies and sums of all sizes, and the cache's bandwidth to copies that fit the cache."""
    state.fit([("bandwidth_bytes_per_s",), ("launch_ns",)], state.of("bandwidth"))
    if state.content.get("l2_bytes") is None:
        return
    state.content["l2_bandwidth_bytes_per_s"] = 4 * state.content["bandwidth_bytes_per_s"]

    def price(case: Case) -> Price:
        nbytes = sum(op.read_bytes + op.write_bytes for op in case.ops())
        return lambda model: model.launch_time_ns + model.traffic_time_ns(nbytes, cached_bytes=nbytes)

    state.fit([("l2_bandwidth_bytes_per_s",), ("launch_ns",)], state.of("cache", price))


def _fit_launches(state: _State) -> None:
    """Set launch times: the smallest product costs its launch; a chain of products and fused kernels gives the fused kernels'."""
    product_ns = state.median_ns("launch of products")
    chain_ns = state.median_ns("launch") / CHAIN
    put(state.content, ("launch_ns",), max(0.1 * product_ns, chain_ns - product_ns))
    state.content["launches_ns"] = {}
    for kind in (OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION, OpKind.OTHER):
        state.content["launches_ns"][str(kind)] = max(1, round(product_ns))


def _fit_products(state: _State) -> None:
    """Fit rate and lengths of the first dtype, the lengths for batches and biases, then the rates of the other dtypes."""
    state.start("half_sizes", "matmul", list(_START_LENGTHS))
    first = next((op.dtype for timed in state.cases.get("matmul", ()) for op in timed.case.ops()), "float32")
    lengths: list[Path] = [("half_sizes", "matmul", place) for place in _LENGTHS]
    state.fit([("flops_per_s", first), *lengths], state.of("matmul"))
    for operator in ("aten.bmm", "aten.addmm"):
        state.start("half_sizes", operator, list(state.content["half_sizes"]["matmul"]))
    state.fit([("half_sizes", "aten.bmm", place) for place in _LENGTHS], state.of("aten.bmm"))
    # A bias costs the same time for each element of the result at every k, as if k were longer by a constant.
    state.fit([("half_sizes", "aten.addmm", 2)], state.of("aten.addmm"))
    for name in ("float32", "bfloat16", "float16"):
        state.fit([("flops_per_s", name)], state.of(f"rate {name}"))
    state.fit([("flops_per_s", "tf32")], state.of("rate tf32", _as_tf32))


def _as_tf32(case: Case) -> Price:
    ops = case.ops()
    return lambda model: float(sum(replace(model, tf32_kinds=(OpKind.MATMUL,)).op_time_ns(op) for op in ops))


def _fit_heavy(state: _State) -> None:
    """Fit attention and convolutions: efficiency, as a part of the products' rate, and lengths; then those of the backwards."""
    for kind in ("attention", "conv"):
        state.start("efficiency", kind, 0.7)
        state.start("half_sizes", kind, list(_START_LENGTHS))
        paths: list[Path] = [("efficiency", kind), *[("half_sizes", kind, place) for place in _LENGTHS]]
        state.fit(paths, state.of(kind), {("efficiency", kind): 1.0})
        for operator in sorted({op.target.rpartition(".")[0] for op in _backwards(state, kind)}):
            state.start("efficiency", operator, state.content["efficiency"][kind])
            state.start("half_sizes", operator, list(state.content["half_sizes"][kind]))
            paths = [("efficiency", operator), ("half_sizes", operator, 1), ("half_sizes", operator, 2)]
            state.fit(paths, state.of(f"{kind} backward"), {("efficiency", operator): 1.0})


def _fit_depthwise(state: _State) -> None:
    """Fit convolutions with one channel a group: the part of the float32 rate that forward and backward reach."""
    for group, figure in (("depthwise", "depthwise"), ("depthwise backward", "depthwise_backward")):
        if group in state.cases:
            state.start("efficiency", figure, 0.2)
            state.fit([("efficiency", figure)], state.of(group), {("efficiency", figure): 1.0})


def _backwards(state: _State, kind: str) -> list[Op]:
    ops = [op for timed in state.cases.get(f"{kind} backward", ()) for op in timed.case.ops()]
    return [op for op in ops if op.kind == kind and "backward" in op.target]


def _fit_arithmetic(state: _State) -> None:
    """Fit the efficiency of pointwise operators by multiply-adds, then that of other operators as fractions of the same rate.

    The others are priced by what they add to the traffic of their kernel: the fit would see no change of an efficiency whose
    arithmetic is shorter than the traffic, and leave it where it started.
    """
    state.start("efficiency", "pointwise", _SLOW)
    state.fit([("efficiency", "pointwise")], state.of("pointwise", _polynomial))
    baseline_ns = state.median_ns("baseline")
    for name in FUNCTIONS:
        if f"aten.{name}" in state.cases:
            state.start("efficiency", f"aten.{name}", _SLOW)

            def price(case: Case) -> Price:
                ops = case.ops()
                return lambda model: baseline_ns + sum(model.arithmetic_time_ns(op) for op in ops)

            state.fit([("efficiency", f"aten.{name}")], state.of(f"aten.{name}", price))
    by_hand: tuple[tuple[str, str, str, int, int], ...] = (
        # group, figure, operator, kernels, and how often they move the argument's bytes in all
        ("prims.inductor_random", "prims.inductor_random", "prims.inductor_random.default", 1, 2),
        ("aten.var_mean", "aten.var_mean", "aten.var_mean.correction", 1, 1),
        ("reduction", "reduction", "aten.sum.dim_IntList", 2, 2),
    )
    for group, figure, operator, kernels, passes in by_hand:
        if group in state.cases:
            state.start("efficiency", figure, _SLOW)

            def fused(case: Case, operator: str = operator, kernels: int = kernels, passes: int = passes) -> Price:
                nbytes, ops = passes * case.arguments()[0].nbytes, [_elementwise(operator, case)] * kernels
                return lambda model: float(
                    kernels * model.launch_time_ns
                    + model.traffic_time_ns(nbytes)
                    + sum(model.arithmetic_time_ns(op) for op in ops)
                )

            state.fit([("efficiency", figure)], state.of(group, fused))


def _fit_scatters(state: _State) -> None:
    for operator in ("aten.embedding", "aten.embedding_dense_backward", "aten.index_put"):
        if operator in state.cases:
            state.start("efficiency", operator, 0.5)
            state.fit([("efficiency", operator)], state.of(operator))


# -- fused kernels, whose operators come from Inductor's decompositions -------------------------------------------------


def _polynomial(case: Case) -> Price:
    """Price of the polynomial: launch, and the longer of its arithmetic and of reading and writing its argument."""
    nbytes, op = 2 * case.arguments()[0].nbytes, _elementwise("aten.mul.Tensor", case)
    op = replace(op, flops=2 * POLYNOMIAL * op.flops)
    return lambda model: float(model.launch_time_ns + max(model.arithmetic_time_ns(op), model.traffic_time_ns(nbytes)))


def _elementwise(operator: str, case: Case) -> Op:
    """Counts of one operator that runs on every element of the case's first argument."""
    tensor = case.arguments()[0]
    is_reduction = operator.startswith(("aten.sum", "aten.var"))
    kind = OpKind.REDUCTION if is_reduction else OpKind.POINTWISE
    flops = tensor.numel() * element_weight(operator.rpartition(".")[0])
    return Op(operator, operator, kind, "float32", flops, tensor.nbytes, tensor.nbytes, False, False)


def _cpu_cache_bytes() -> int | None:
    """Bytes of the second-level caches of all processors that torch's threads run on; None if the system does not tell."""
    try:
        each = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return each * torch.get_num_threads() if each > 0 else None
