"""Calibration at toy size: every case runs, the fit is written, and the file is a device."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compile_remat import cli
from compile_remat.cli import calibrate as command
from compile_remat.cost_models import Device, OpKind, Roofline, load_device
from compile_remat.cost_models.device.files import device_from_json, device_to_json
from compile_remat.cost_models.timing import calibration, interleaved
from compile_remat.cost_models.timing.calibration import _float32_is_float32, fitted, sheet_of, start_of
from compile_remat.cost_models.timing.interleaved import MIN_ROUNDS, TimedCase, clock_ratio, run_rounds
from compile_remat.cost_models.timing.microbenchmarks import Case, cases, sustained_case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy_cases() -> list[Case]:
    return cases(CPU, torch.float32, [torch.bfloat16], is_toy=True)


@pytest.fixture(scope="module")
def device_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "mine.json"
    assert cli.main(["calibrate", "--device", "cpu", "--seconds", "0.2", "--out", str(path)]) == 0
    return path


def test_the_file_is_a_device_with_measured_figures(device_file: Path) -> None:
    """Only the names of the measured figures are checked: kernels of this size are too short for their values."""
    device, table = load_device(str(device_file)), load_device("cpu")
    assert device.name == "cpu", "by this name the planner knows what kernels of CPUs take beside their outputs"
    assert any("compile-remat calibrate" in source for source in device.sources)
    assert {"matmul", "conv", "attention"} <= {name for name, _ in device.half_sizes}
    assert {"conv", "attention", "pointwise", "aten.embedding_dense_backward"} <= {
        name for name, _ in device.efficiency
    }
    assert device.bandwidth_bytes_per_s != table.bandwidth_bytes_per_s  # products so small say nothing of flops


def test_every_group_of_cases_is_there_at_both_sizes(toy_cases: list[Case]) -> None:
    whole = {case.group for case in cases(CPU, torch.float32, [torch.bfloat16])}
    assert {"bandwidth", "launch", "matmul", "attention", "conv", "pointwise", "prims.inductor_random"} <= whole
    assert {case.group for case in toy_cases} <= whole
    names = [case.name for case in cases(CPU, torch.float32, [torch.bfloat16, torch.float16], is_tf32=True)]
    assert len(set(names)) == len(names)


def test_a_device_that_runs_by_the_model_is_found_again(toy_cases: list[Case]) -> None:
    """Times that a known device would take, in place of measured ones: then every product costs what it cost there."""
    known = start_of(CPU)
    known["flops_per_s"] = {"float32": 90_000_000_000, "bfloat16": 200_000_000_000}
    known["bandwidth_bytes_per_s"] = 9_000_000_000
    known["half_sizes"] = {"matmul": [20.0, 30.0, 10.0]}
    model = Roofline(device_of(known), tf32_kinds=())
    timed = []
    for case in cases(CPU, torch.float32, [torch.bfloat16]):
        if case.group in ("bandwidth", "matmul", "cache", "rate bfloat16"):
            timed.append(
                TimedCase(case, lambda: None, times_ns=[float(sum(model.op_time_ns(op) for op in case.ops()))])
            )
        elif case.group in ("launch of products", "launch", "baseline"):
            timed.append(TimedCase(case, lambda: None, times_ns=[float(known["launch_ns"])]))
    found = fitted(start_of(CPU), timed)
    errors = {
        point.name: point.error(found.model()) for point in found.points if point.name.startswith(("mm ", "layer "))
    }
    assert len(errors) > 10
    assert max(map(abs, errors.values())) < 0.05, errors


def device_of(content: object) -> Device:
    return device_from_json("known", content, "a test")


def test_cases_are_interleaved(toy_cases: list[Case]) -> None:
    ran: list[str] = []
    picked = [case for case in toy_cases if case.is_cold][:3]
    timed = [TimedCase(case, lambda name=case.name: ran.append(name)) for case in picked]  # type: ignore[misc]
    rounds: list[int] = []
    run_rounds(timed, CPU, 0.0, lambda count, passed: rounds.append(count))
    names = [case.name for case in picked]
    assert rounds == list(range(1, MIN_ROUNDS + 1))
    assert ran == [*names, *names[1:], *names[:1], *names[2:], *names[:2]]
    assert all(len(each.times_ns) == MIN_ROUNDS and min(each.times_ns) >= 1 for each in timed)


def test_cases_are_made_on_the_device_that_is_asked_for() -> None:
    """The same code for CPU and CUDA: on fake tensors no device is needed to see where arguments go."""
    found = cases(torch.device("meta"), torch.bfloat16, [torch.float16, torch.float32], is_tf32=True, is_toy=True)
    for case in found:
        assert {x.device.type for x in case.arguments()} == {"meta"}
    dtypes = {case.group: {x.dtype for x in case.arguments()} for case in found}
    for group in ("matmul", "attention", "conv", "conv backward"):
        assert dtypes[group] == {torch.bfloat16}
    groups = {case.group for case in cases(torch.device("meta"), torch.bfloat16)}
    assert {"depthwise", "depthwise backward"} <= groups
    assert dtypes["rate float32"] == dtypes["rate tf32"] == {torch.float32}
    assert dtypes["pointwise"] == dtypes["aten.exp"] == {torch.bfloat16}, "half the bytes, so that arithmetic shows"


def test_a_gpu_runs_the_sizes_that_train() -> None:
    """Fits to smaller products were 10 % too fast for those of a training step, and no attention was causal and 128 wide."""
    found = cases(torch.device("meta"), torch.bfloat16)
    products = {op.product for case in found if case.name.startswith("layer ") for op in case.ops()}
    for width in (2048, 8192, 50304):
        assert products >= {(1, 8192, width, 2048), (1, 8192, 2048, width), (1, width, 2048, 8192)}
    heads = {case.arguments()[0].shape[1::2] for case in found if case.name.startswith("attention ")}
    assert heads >= {(tokens, width) for tokens in (2048, 4096, 8192) for width in (64, 128)}
    assert next(case for case in found if case.name == "exp").arguments()[0].numel() == 64 << 20
    assert sustained_case(torch.device("meta"), torch.bfloat16).name == "layer 8192x50304x2048"


def test_the_clock_of_a_step_is_that_of_work_without_a_pause(
    toy_cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that computes at its full clock for a while, and then at four fifths of it."""
    ran = 0

    def run() -> None:
        nonlocal ran
        ran += 1

    def took(run: Callable[[], None], device: torch.device, *, calls: int = 1, before: object = None) -> int:
        run()
        return round(calls * (1000 if ran < 50 else 1250))

    def pause(seconds: float) -> None:
        nonlocal ran
        ran = 0

    monkeypatch.setattr(interleaved, "elapsed_ns", took)
    monkeypatch.setattr(interleaved.time, "sleep", pause)
    timed = TimedCase(toy_cases[0], run, calls=3)
    assert clock_ratio(timed, CPU, 100_000) == 0.8
    assert clock_ratio(timed, CPU, 20_000) == 1.0


def test_the_clock_slows_the_steps_that_are_priced_and_not_the_points_of_the_fit(toy_cases: list[Case]) -> None:
    groups = ("launch of products", "launch", "baseline", "matmul")
    timed = [TimedCase(case, lambda: None, times_ns=[1e6]) for case in toy_cases if case.group in groups]
    found = fitted(start_of(CPU), timed, sustained_clock_ratio=0.9)
    assert device_of(found.content).sustained_clock_ratio == 0.9
    assert found.model() == fitted(start_of(CPU), timed).model()


def test_the_data_sheet_limits_the_rates_of_devices_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sheet_of(CPU) == {}, "the table's CPU is a stand-in"
    monkeypatch.setattr(calibration, "detect", lambda device: load_device("h200"))
    sheet = sheet_of(torch.device("cuda"))
    assert sheet["flops_per_s", "bfloat16"] == 989.4e12
    assert sheet["bandwidth_bytes_per_s",] == 4.8e12


def test_rates_of_every_type_are_fitted() -> None:
    """As on a GPU: products in bfloat16 first, then the rates of float32 and TF32."""
    planted = {"bfloat16": 400e12, "float32": 40e12, "tf32": 200e12}
    start = device_to_json(load_device("a100-80gb")) | {"efficiency": {}, "half_sizes": {}}
    model = Roofline(device_of(start | {"flops_per_s": planted, "half_sizes": {"matmul": [0, 0, 64]}}), tf32_kinds=())
    tf32 = replace(model, tf32_kinds=(OpKind.MATMUL,))
    timed = []
    for case in cases(torch.device("meta"), torch.bfloat16, [torch.float32], is_tf32=True):
        if case.group in ("matmul", "rate float32", "rate tf32", "launch of products", "launch", "baseline"):
            priced = tf32 if case.group == "rate tf32" else model
            took = float(sum(priced.op_time_ns(op) for op in ([] if case.compiled else case.ops())))
            timed.append(TimedCase(case, lambda: None, times_ns=[max(took, float(start["launch_ns"]))]))
    found = fitted(start, timed).content["flops_per_s"]
    assert found["float32"] == pytest.approx(planted["float32"], rel=0.1)
    assert found["tf32"] == pytest.approx(planted["tf32"], rel=0.1)
    assert found["bfloat16"] == pytest.approx(planted["bfloat16"], rel=0.25)


def test_tf32_is_off_while_float32_is_measured() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    with _float32_is_float32():
        assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_is_calibrated_by_the_same_command(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert cli.main(["calibrate", "--device", "cuda", "--seconds", "0.2", "--out", str(path)]) == 0
    device = load_device(str(path))
    assert device.memory_bytes and device.multiprocessors != 0


@pytest.mark.parametrize(("seconds", "message"), [("0", "above 0"), ("-3", "above 0"), ("1e9", "at most 3600")])
def test_a_time_that_makes_no_sense_is_refused(seconds: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["calibrate", "--seconds", seconds])
    assert message in capsys.readouterr().err


def test_other_devices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--device", "meta", "--seconds", "1"]) == 2
    assert "cpu and cuda" in capsys.readouterr().err


def test_figures_are_written_with_four_digits() -> None:
    content = {"a": {"b": 0.123456}, "c": 123_456_789_012, "d": [1.23456, 0.0], "e": "text", "f": 7, "g": None}
    expected = {"a": {"b": 0.1235}, "c": 123_500_000_000, "d": [1.235, 0.0], "e": "text", "f": 7, "g": None}
    assert command.rounded(content) == expected
    assert json.loads(json.dumps(command.rounded(content))) == expected
