"""Predicted peaks of random programs beside their code's."""

from __future__ import annotations

from dataclasses import replace

from tests.fuzz.code_peaks import LIMIT, Peaks, errors_of, peaks_of, shortened, summary
from tests.fuzz.program import Leaf, Op, Program

DROPPED = Program(
    (Leaf("d0", "differentiable", (12, 40, 32), "float32"), Leaf("p1", "parameter", (32,), "float32")),
    (
        Op("v0", "mul", ("d0", "p1")),
        Op("v1", "dropout", ("v0",)),
        Op("v2", "tanh", ("v1",)),
        Op("v3", "sin", ("v2",)),
    ),
    ("v3", "v1"),
)


def test_the_peak_of_a_program_is_that_of_its_code() -> None:
    peaks = peaks_of(DROPPED)
    assert peaks is not None and peaks.emitted > 12 * 40 * 32 * 4 and abs(peaks.error) <= LIMIT


def test_a_program_without_a_backward_has_no_peak() -> None:
    frozen = tuple(replace(leaf, role="input") for leaf in DROPPED.leaves)
    assert peaks_of(replace(DROPPED, leaves=frozen)) is None


def test_what_is_predicted_wrong_is_made_as_short_as_it_stays_so() -> None:
    def measure(program: Program) -> Peaks:
        return Peaks(50 if "tanh" in program.kinds else 100, 100)

    shorter = shortened(DROPPED, measure)
    assert [op.kind for op in shorter.body] == ["tanh"] and len(shorter.outputs) == len(shorter.leaves) == 1
    assert shorter.module()


def test_the_same_seed_gives_the_same_programs() -> None:
    first, second = (list(errors_of(4, seed=1)) for _ in range(2))
    assert first == second


def test_summary() -> None:
    assert "within 3% at 2, median 2.00%, below by up to 25.0%, above by up to 2.0%" in summary([0.0, -0.25, 0.02])
    assert summary([]) == "no peak is known"
