"""The demo: its text, its flags, its table, and a toy run end to end."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compile_remat import cli
from compile_remat.cli import demo, demo_job
from compile_remat.cli.demo_job import JobResult, JobSize
from compile_remat.device.measure import Peak

TOY = ["--layers", "1", "--width", "64", "--context", "64", "--batch", "8", "--steps", "4", "--max-bytes", "400000"]


def _result(train_loss: float, validation_loss: float, peak_bytes: int = 100) -> JobResult:
    return JobResult(Peak(peak_bytes, 0, 1, peak_bytes), 1_000_000, (5.0, train_loss), validation_loss)


def _parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(flags)


def _folder(root: Path) -> Path:
    for number in range(20):
        (root / f"module_{number:02}.py").write_text(f"value = {number}\n" * 30)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "foreign.py").write_text("")
    (root / "package" / "test").mkdir(parents=True)
    (root / "package" / "test" / "test_x.py").write_text("")
    return root


def test_files_are_sorted_and_without_tests_or_installed_packages(tmp_path: Path) -> None:
    files = demo_job.standard_library_files(_folder(tmp_path))
    assert [path.name for path in files] == [f"module_{number:02}.py" for number in range(20)]
    some = demo_job.standard_library_files(tmp_path, max_bytes=2000)
    assert some == files[: len(some)]
    assert sum(path.stat().st_size for path in some) <= 2000


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found 0 of them"):
        demo_job.standard_library_files(tmp_path)


def test_split_is_disjoint_and_deterministic(tmp_path: Path) -> None:
    files = demo_job.standard_library_files(_folder(tmp_path))
    text = demo_job.load_text(files)
    assert text.validation_files == (str(files[-1]),)
    assert set(text.train_files).isdisjoint(text.validation_files)
    assert len(text.train_files) + len(text.validation_files) == len(files)
    again = demo_job.load_text(files)
    assert torch.equal(text.train, again.train) and torch.equal(text.validation, again.validation)


def test_the_standard_library_of_this_machine_is_enough() -> None:
    text = demo_job.load_text(demo_job.standard_library_files())
    assert len(text.train) > 1_000_000
    assert len(text.validation) > 10_000


def test_batches_are_shifted_by_one_and_repeat_with_the_seed() -> None:
    size = JobSize(layers=1, width=8, heads=1, context=16, batch=4, steps=3, seed=0, device="cpu")
    data = torch.arange(200, dtype=torch.uint8)
    tokens, targets = next(demo_job.batches(data, size, seed=5))
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens, next(demo_job.batches(data, size, seed=5))[0])
    assert not torch.equal(tokens, next(demo_job.batches(data, size, seed=6))[0])


def test_too_little_text_is_an_error() -> None:
    size = JobSize(layers=1, width=8, heads=1, context=16, batch=4, steps=3, seed=0, device="cpu")
    with pytest.raises(ValueError, match="16 bytes of text"):
        next(demo_job.batches(torch.zeros(16, dtype=torch.uint8), size, seed=0))


def test_training_lowers_the_loss_and_measures_the_second_step() -> None:
    size = JobSize(layers=1, width=32, heads=2, context=32, batch=4, steps=12, seed=0, device="cpu")
    text = demo_job.load_text(demo_job.standard_library_files(max_bytes=200_000))
    result = demo_job.train(text, size, lambda module: module, lambda step, loss: None)
    assert result.losses[-1] < result.losses[0]
    assert result.peak.peak_bytes > result.peak.end_bytes > 0
    assert result == _trained_again(text, size, result)


def _trained_again(text: demo_job.Text, size: JobSize, first: JobResult) -> JobResult:
    """A second run, with the first one's clock readings."""
    result = demo_job.train(text, size, lambda module: module, lambda step, loss: None)
    return JobResult(result.peak, first.step_ns, result.losses, result.validation_loss)


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


def test_losses_must_agree() -> None:
    plain = demo.DemoRun("plain", None, _result(2.0, 2.5))
    near = demo.DemoRun("near", 100, _result(2.0019, 2.5024))
    far = demo.DemoRun("far", 100, _result(2.01, float("nan")))
    assert demo.disagreements([plain, near]) == []
    assert len(demo.disagreements([plain, near, far])) == 2


def test_table_shows_what_was_measured_and_predicted() -> None:
    plan = SimpleNamespace(peak_bytes=49 << 20, recompute_time_ns=2_000_000, step_time_ns=10_000_000)
    report = SimpleNamespace(plan=plan)
    plain = demo.DemoRun("plain", None, _result(2.0, 2.5, 100 << 20))
    ours = demo.DemoRun("remat 0.5", 50 << 20, _result(2.0, 2.5, 48 << 20), report)
    titles, _, *rows = demo.table([plain, ours]).strip().splitlines()
    assert titles.split()[:7] == ["run", "measured", "MiB", "predicted", "MiB", "budget", "MiB"]
    assert rows[0].split() == ["plain", "100.0", "-", "-", "1", "-", "2.0000", "2.5000"]
    assert rows[1].split() == ["remat", "0.5", "48.0", "49.0", "50.0", "1", "2.0", "ms,", "20.0%", "2.0000", "2.5000"]


def test_toy_run_end_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("compile_remat.backend")
    status = cli.main(["demo", *TOY, "--budgets", "0.7,0.01"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "remat 0.7" in printed
    assert "the lowest reachable peak is" in printed
    assert "losses agree" in printed
