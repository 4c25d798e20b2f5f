"""Asked figures beside those that were measured, a line each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.common.harness import mib, percent
from benchmarks.contest.frontier import PEAK_LIMIT, Point, find, measured_extra, rivals_beaten

RIVALS = (("checkpoint", "blocks"), ("torch", "0.5"))
ASKED: Mapping[tuple[str, str], float] = {
    ("gpt", "checkpoint blocks"): 0.945,
    ("llama", "checkpoint blocks"): 0.94,
    ("resnet50", "checkpoint blocks"): 0.90,
    ("gpt", "torch 0.5"): 0.935,
    ("llama", "torch 0.5"): 0.935,
}
"""The most that our step may take of a rival's, with no higher peak."""
AT_CHECKPOINT, WITH_OFFLOAD = "at checkpoint blocks", "at checkpoint blocks, offload"
"""Settings of our points at the peak of checkpointed blocks."""
ASKED_OF_OFFLOAD: Mapping[str, float] = {"gpt": 0.91, "llama": 0.91}
"""The most that our step with offload may take of checkpointed blocks', with no higher peak."""
STEP_ERROR, EXTRA_ERROR = 0.05, 0.02
"""Of the measured step: of the predicted step, and of the predicted time beyond plain's."""
GRADIENT_RATIO = 1.05
"""The most that the distance of our gradients from float64's may be of that of plain's."""

Judged = Literal["times", "peaks", "gradients"]


@dataclass(frozen=True)
class Verdict:
    """One line; `is_met` is None for what is told and not asked for."""

    text: str
    is_met: bool | None

    def __str__(self) -> str:
        return f"{ {True: 'ok', False: 'MISS', None: '-'}[self.is_met]:4}  {self.text}"


def of_model(model: str, points: Sequence[Point], judged: frozenset[Judged]) -> list[Verdict]:
    """All lines of a model; what is not `judged` is told alone: times of a CPU or of toys mean nothing."""
    groups: tuple[tuple[Judged, Iterator[Verdict]], ...] = (
        ("times", _ratios(model, points)),
        ("times", _offload(model, points)),
        ("times", _predictions(model, points)),
        ("peaks", _peaks(model, points)),
        ("gradients", _gradients(model, points)),
    )
    failed = [Verdict(f"{model}: {p.name}: {p.failure.splitlines()[0]}", False) for p in points if p.failure]
    return failed + [each if kind in judged else Verdict(each.text, None) for kind, group in groups for each in group]


def _ratios(model: str, points: Sequence[Point]) -> Iterator[Verdict]:
    for kind, setting in RIVALS:
        rival = find(points, kind, setting)
        name, asked = f"{kind} {setting}", ASKED.get((model, f"{kind} {setting}"))
        text = f"{model}: at the peak of {name}" + ("" if asked is None else f" (asked: {asked:.3f} of its time)")
        ours = _ours_at(rival, points)
        if rival is None or ours is None or not rival.step_ns or not ours.step_ns:
            yield Verdict(f"{text}: not measured", None if asked is None else False)
            continue
        ratio = ours.step_ns / rival.step_ns
        visits = [a / b for a, b in zip(ours.visits_ns or (), rival.visits_ns or (), strict=False)]
        spread = f" (visits {min(visits):.3f} to {max(visits):.3f})" if visits else ""
        yield Verdict(f"{text}: {ours.name} takes {ratio:.3f}{spread}", None if asked is None else ratio <= asked)


def _offload(model: str, points: Sequence[Point]) -> Iterator[Verdict]:
    asked, moved = ASKED_OF_OFFLOAD.get(model), find(points, "remat", WITH_OFFLOAD)
    kept, rival = find(points, "remat", AT_CHECKPOINT), find(points, *RIVALS[0])
    if asked is None or moved is None:
        return
    text = f"{model}: with offload at the peak of checkpoint blocks (asked: {asked:.3f} of its time)"
    if rival is None or kept is None or not rival.step_ns or not moved.step_ns or not kept.step_ns:
        yield Verdict(f"{text}: not measured", False)
        return
    ratio, gain_ns = moved.step_ns / rival.step_ns, kept.step_ns - moved.step_ns
    gained = f"{gain_ns / 1e6:.2f} ms less than without it, {percent(gain_ns / kept.step_ns)}"
    yield Verdict(f"{text}: {ratio:.3f}, {gained}", ratio <= asked)


def _ours_at(rival: Point | None, points: Sequence[Point]) -> Point | None:
    """Our point at the rival's peak; where there is none, the fastest with no higher peak."""
    if rival is None:
        return None
    best = next((ours for each, ours, _ in rivals_beaten(points) if each is rival), None)
    return find(points, "remat", f"at {rival.name}") or best


def _predictions(model: str, points: Sequence[Point]) -> Iterator[Verdict]:
    for point in _ours(points):
        if point.time_error is None:
            continue
        text = f"{model}: {point.name}: predicted step off by {point.time_error:+.1%} (asked: {STEP_ERROR:.0%})"
        yield Verdict(text, abs(point.time_error) <= STEP_ERROR)
        extra = measured_extra(point, points)
        if extra is not None and point.extra_share is not None:
            text = f"{model}: {point.name}: extra time {percent(extra)} of plain's step, predicted "
            text += f"{percent(point.extra_share)} (asked: within {EXTRA_ERROR:.0%})"
            yield Verdict(text, abs(extra - point.extra_share) <= EXTRA_ERROR)


def _peaks(model: str, points: Sequence[Point]) -> Iterator[Verdict]:
    for point in _ours(points):
        error = point.peak_error or 0.0
        budget = "no budget in bytes" if point.budget_bytes is None else f"budget {mib(point.budget_bytes)}"
        if point.peak_bytes is None:
            yield Verdict(f"{model}: {point.name}: no plan fits, {budget}, floor {mib(point.floor_bytes)} MiB", False)
            continue
        over = point.budget_bytes is not None and point.peak_bytes > point.budget_bytes
        text = f"{model}: {point.name}: peak {mib(point.peak_bytes)} MiB, {budget}, predicted "
        text += (
            f"{mib(point.predicted_peak_bytes)} ({error:+.2%}; asked: {PEAK_LIMIT:.0%}{', above the budget' * over})"
        )
        yield Verdict(text, not over and abs(error) <= PEAK_LIMIT)


def _gradients(model: str, points: Sequence[Point]) -> Iterator[Verdict]:
    plain = find(points, "plain", "default")
    if plain is None or not plain.exact_difference:
        return
    for point in points:
        if point.exact_difference is None or point.kind not in ("checkpoint", "torch", "remat"):
            continue
        ratio = point.exact_difference / plain.exact_difference
        text = f"{model}: {point.name}: gradients {point.exact_difference:.2e} from float64's, {ratio:.3f} of plain's"
        asked = f" (asked: {GRADIENT_RATIO:g})" if point.kind == "remat" else ""
        yield Verdict(text + asked, ratio <= GRADIENT_RATIO if asked else None)


def _ours(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.kind == "remat" and not (point.failure and point.peak_bytes is None)]
