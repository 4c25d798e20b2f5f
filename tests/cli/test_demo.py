"""The demo: its text, its flags, its table, and a toy run end to end."""

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_remat import cli
from compile_remat.cli import demo, demo_job
from compile_remat.cli.demo_job import Run

TOY = ["--layers", "1", "--width", "64", "--context", "64", "--batch", "8", "--steps", "4", "--max-bytes", "400000"]
PLAIN = Run("plain", peak_bytes=100 << 20, step_ms=1.0, train_loss=2.0, validation_loss=2.5)


def _report(budget_bytes: int) -> Any:
    plan = SimpleNamespace(peak_bytes=49 << 20, recompute_time_ns=2_000_000, once_time_ns=10_000_000)
    return SimpleNamespace(plan=plan, budget_bytes=budget_bytes)


def _parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(flags)


def test_windows_are_of_the_text_and_repeat_with_the_seed() -> None:
    size = _parsed("--context", "16", "--batch", "4")
    text = bytes(range(200))
    found = demo_job.windows(text, size, count=3, seed=5)
    assert found.shape == (3, 4, 17)
    assert torch.equal(found[..., 1:], found[..., :-1] + 1)
    assert torch.equal(found, demo_job.windows(text, size, count=3, seed=5))
    assert not torch.equal(found, demo_job.windows(text, size, count=3, seed=6))


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(SystemExit, match="16 bytes of text are too few for a context of 16"):
        demo_job.windows(bytes(16), _parsed("--context", "16"), count=1, seed=0)


def test_logits_see_no_later_byte() -> None:
    model, window = demo_job.ByteGPT(_parsed("--layers", "1", "--width", "32", "--context", "8")), torch.arange(9)[None]
    logits: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    with torch.no_grad():
        model(window)
        model(window.index_fill(1, torch.tensor([4]), 77))
    assert torch.equal(logits[0][:, :4], logits[1][:, :4])
    assert not torch.allclose(logits[0][:, 4:], logits[1][:, 4:])


def test_budgets_are_fractions_or_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parsed().budgets == (0.5, 0.3)
    assert _parsed("--budgets", "0.8, 90MiB,min").budgets == (0.8, "90MiB", "min")
    with pytest.raises(SystemExit):
        _parsed("--budgets", "90")
    assert "give a size a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--width", "190"], "--heads 4 does not divide --width 190"),
        (["--steps", "2"], "needs a third to time"),
    ],
)
def test_impossible_sizes_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        demo.run_demo(_parsed(*flags))


def test_losses_must_agree_and_peaks_be_inside() -> None:
    near = replace(PLAIN, name="near", train_loss=2.0019, validation_loss=2.5024)
    far = replace(PLAIN, name="far", train_loss=2.01, validation_loss=float("nan"))
    above = replace(PLAIN, name="above", report=_report(PLAIN.peak_bytes - 1))
    assert demo_job.failures([PLAIN, near, replace(near, report=_report(PLAIN.peak_bytes))]) == []
    assert [text.partition(":")[0] for text in demo_job.failures([PLAIN, near, far, above])] == ["far", "far", "above"]


def test_table_shows_what_was_measured_and_predicted() -> None:
    ours = replace(PLAIN, name="remat 0.5", peak_bytes=48 << 20, report=_report(50 << 20))
    assert [*demo_job.row(PLAIN).values()] == ["plain", "100.0", "-", "-", "1", "-", "2.0000", "2.5000"]
    assert demo_job.row(ours) == {
        "run": "remat 0.5",
        "measured MiB": "48.0",
        "predicted MiB": "49.0",
        "budget MiB": "50.0",
        "step ms": "1",
        "extra recompute": "2.0 ms, 20.0%",
        "train loss": "2.0000",
        "validation": "2.5000",
    }


def test_toy_run_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["demo", *TOY, "--budgets", "0.7,0.01"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "MiB of the Python standard library" in printed
    assert "remat 0.7" in printed
    assert "the lowest reachable peak is" in printed
    assert "losses agree" in printed
    plain = next(line for line in printed.splitlines() if line.startswith("plain "))
    assert float(plain.split()[-1]) < 5.5, "a model that knows nothing has a loss of log 256 = 5.55"
