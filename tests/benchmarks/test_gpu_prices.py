"""Prices of the table's H200 against steps that were measured on one: stored times, and the work of plans at full size.

The figures of the table are fitted to the plain steps of the GPT and the Llama alone, and judged on the other points.  Asked are
the step within 5 %, each family of kernels within 10 %, and the extra time within 2 % of the step.  `MISSED` has what fails, and by
how much.
"""

from collections.abc import Iterator

import pytest

from benchmarks import gpu_prices
from benchmarks.gpu_prices import ATTENTION, FAMILIES, FUSED, PLAIN, PRODUCTS, Row
from compile_remat.cost_models import load_device

STEP, FAMILY, EXTRA = "step", 0.10, "extra"
LIMITS = {STEP: 0.05, **dict.fromkeys(FAMILIES, FAMILY), EXTRA: 0.02}

MISSED = {
    ("gpt", "checkpoint blocks"): {FUSED: -0.150},
    ("gpt", "remat max"): {FUSED: -0.136},
    ("gpt", "torch 0.5"): {FUSED: -0.143},
    ("gpt", "torch 0.1"): {FUSED: -0.166},
    ("gpt", "remat min"): {FUSED: -0.185, EXTRA: -0.030},
    ("gpt", "remat 0.5"): {FUSED: -0.209, EXTRA: -0.031},
    ("gpt", "remat 0.3"): {FUSED: -0.192, EXTRA: -0.024},
    ("llama", "torch 0.1"): {FUSED: -0.122, EXTRA: -0.036},
    ("llama", "remat 0.5"): {FUSED: -0.237, EXTRA: -0.040},
    ("llama", "remat 0.3"): {FUSED: -0.233, EXTRA: -0.050},
    ("llama", "remat min"): {FUSED: -0.163, EXTRA: -0.038},
    ("llama", "remat at torch 0.1"): {FUSED: -0.229, EXTRA: -0.045},
    ("resnet50", "remat 0.5"): {PRODUCTS: 0.238, FUSED: -0.263},
}
"""Errors beyond what is asked, of `LIMITS`.

Fused kernels are priced too low, by a tenth in plain steps, and by more in our own measured plans, whose code moved more than
today's.  It read sums of the residual
stream as chains of three and more operands, wrote recomputed norms in float32, and had fusions refused that would have cost no
memory.  The extra time misses by that; see `test_fused_kernels_explain_the_extra_time`.  Plans of today compute fewer products
again than ran: `LEFT_OUT`.

ResNet-50: the lengths of convolutions come from a calibration on few and small ones.
"""

LEFT_OUT = {("llama", "remat 0.3"): 3, ("llama", "remat min"): 1}
"""Products that were measured and that the nearest plan of today does not run."""


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Row]:
    return {(row.model, row.point): row for row in gpu_prices.rows(load_device("h200"))}


def errors_of(row: Row) -> Iterator[tuple[str, float]]:
    yield STEP, row.error
    for family in FAMILIES:
        yield family, row.family_error(family)
    if row.extra is not None and row.predicted_extra is not None:
        yield EXTRA, row.predicted_extra - row.extra


def test_all_points_with_kernels_and_a_plan_are_judged(found: dict[tuple[str, str], Row]) -> None:
    assert len(found) == 15
    assert {model for model, point in found if point == PLAIN} == {"gpt", "llama"}
    for (model, point), row in found.items():
        if model != "resnet50":  # there, padding and sums of split products count as products
            left_out = row.launches[PRODUCTS] - row.predicted_launches[PRODUCTS]
            assert left_out == LEFT_OUT.get((model, point), 0), "the plan computes what was measured"


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_table_has_the_figures_of_the_plain_steps(model: str, found: dict[tuple[str, str], Row]) -> None:
    """Products, attention and the clock are fitted to both; the bandwidth of fused kernels is that of calibrated copies.

    Attention is met by 1 % of the two together, and by 5 % of each: how short sequences are priced was fitted to `calibrate`.
    """
    row, device = found[model, PLAIN], load_device("h200")
    assert abs(row.family_error(PRODUCTS)) < 0.01
    assert abs(row.family_error(ATTENTION)) < 0.05
    assert abs(sum(found[each, PLAIN].family_error(ATTENTION) for each in ("gpt", "llama"))) < 0.01
    assert abs(row.family_error(FUSED)) < 0.09
    assert abs(row.error) < 0.017
    without_arithmetic_ns = row.family_ns[FUSED] + device.launch_ns * sum(row.launches.values())
    ratio = (row.family_ns[PRODUCTS] + row.family_ns[ATTENTION]) / (row.step_ns - without_arithmetic_ns)
    assert ratio == pytest.approx(device.sustained_clock_ratio, abs=0.003)


def test_predictions_are_as_good_as_asked_and_as_bad_as_said(found: dict[tuple[str, str], Row]) -> None:
    for key, row in found.items():
        missed = MISSED.get(key, {})
        for name, error in errors_of(row):
            if name in missed:
                assert error == pytest.approx(missed[name], abs=0.002), (key, name)
                assert abs(error) > LIMITS[name], (key, name, "no longer missed")
            else:
                assert abs(error) <= LIMITS[name], (key, name)


def test_fused_kernels_explain_the_extra_time(found: dict[tuple[str, str], Row]) -> None:
    """With the times of the fused kernels that ran, steps of both models are within 1.6 %, and the extra time within 2.6 points."""
    for (model, point), row in found.items():
        if model == "resnet50":
            continue
        plain = found[model, PLAIN]
        step_ns, plain_ns = (
            each.predicted_step_ns + each.family_ns[FUSED] - each.predicted_family_ns[FUSED] for each in (row, plain)
        )
        assert step_ns == pytest.approx(row.step_ns, rel=0.016), (model, point)
        assert row.extra is not None
        assert step_ns / plain_ns - 1 == pytest.approx(row.extra, abs=0.026), (model, point)


def test_without_its_own_figures_the_card_is_met_nearly_as_well() -> None:
    """The fractions of `GPU_EFFICIENCY`, which the other cards of the table are priced by."""
    guessed = gpu_prices.rows(gpu_prices.with_default_figures(load_device("h200")))
    errors = [row.error for row in guessed if row.model != "resnet50"]
    assert -0.06 < min(errors) < max(errors) < 0.03


def test_the_command_prints_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_prices.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["model", "point", "step", "ms"]
    assert "checkpoint blocks" in lines[3] and "103.6" in lines[3]


def test_the_work_survives_being_written_and_read(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    known = gpu_prices.read_work()["llama"]
    monkeypatch.setattr(gpu_prices, "WORK", tmp_path / "work.json")  # type: ignore[operator]
    gpu_prices.write_work("llama", known)
    assert gpu_prices.read_work() == {"llama": known}
