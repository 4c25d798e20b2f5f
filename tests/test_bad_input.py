"""Mistakes of users, through the real call: one clear error, or the obvious right behaviour.

The plain cases (an unknown option, a malformed size, a budget below the floor, a damaged plan) are in `test_backend`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_remat
from compile_remat.backend import remat
from compile_remat.errors import ConfigError, DeviceError, PlanMismatchError, PlannerWarning
from compile_remat.inductor.entry import CustomPartitionerFn
from compile_remat.partitioning import joint_split
from compile_remat.passes import Status
from compile_remat.planning import joint_planning, joint_problem, settings

MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("uncached")


def model_and_input(layers: int = 4) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(8, 8), nn.Tanh())]), torch.randn(64, 8)


def train(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    output = call(x)
    output.sum().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def trained(**options: Any) -> None:
    """A step of training; the gradients are those of eager mode."""
    model, x = model_and_input()
    actual = train(torch.compile(model, backend=remat, options={"compiler": "eager", **options}), model, x)
    torch.testing.assert_close(actual, train(model, model, x), rtol=1e-4, atol=1e-5)


# -- budgets ----------------------------------------------------------------------------------------------------------


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"bandwidth_bytes_per_s": NaN, "flops_per_s": {"float32": 1e12}}', "above 0"),
        (b'{"bandwidth_bytes_per_s": Infinity, "flops_per_s": {"float32": 1e12}}', "bandwidth_bytes_per_s"),
        (b'{"bandwidth_bytes_per_s": 1e12, "flops_per_s": {"float32": Infinity}}', "float32"),
        (b'{"bandwidth_bytes_per_s": 1' + 400 * b"0" + b', "flops_per_s": {"float32": 1e12}}', "at most"),
        (b'{"bandwidth_bytes_per_s": 1e12, "flops_per_s": {"float32": 1e12}, "sources": 3}', "sources"),
    ],
)
def test_a_damaged_device_file(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_bytes(content)
    with pytest.raises(DeviceError, match=r"gpu\.json") as caught:
        trained(device=str(path))
    assert said in str(caught.value)


def test_a_device_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").mkdir()
    with pytest.raises(DeviceError, match="cannot be read"):
        trained(device=tmp_path / "gpu.json")


# -- options and modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [3, "memory_budget=min", [("memory_budget", "min")], {"memory_budget"}])
def test_options_that_are_no_dict(options: Any) -> None:
    model, x = model_and_input()
    with pytest.raises(ConfigError, match="options are a dict"):
        torch.compile(model, backend=remat, options=options)(x)


def test_option_names_that_are_no_strings() -> None:
    model, x = model_and_input()
    with pytest.raises(ConfigError, match="option names are strings"):
        torch.compile(model, backend=remat, options={3: "min"})(x)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "value"), [("max_fusion_size", "many"), ("epilogue_fusion", 3), ("max_autotune", None)]
)
def test_an_option_of_inductor_of_the_wrong_type(name: str, value: object) -> None:
    """The same values are refused by torch.compile with its own backend."""
    model, x = model_and_input()
    with pytest.raises(RuntimeError, match="Unexpected type"):
        torch.compile(model, options={name: value})(x)
    with pytest.raises(ConfigError, match=rf"{name} = {value!r} \(an option of Inductor\)"):
        trained(**{name: value})


def test_an_option_that_would_take_our_place() -> None:
    class Another(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            raise AssertionError("never called")

        def uuid(self) -> str:
            return "another"

    with pytest.raises(ConfigError, match="custom_partitioner_fn"):
        trained(custom_partitioner_fn=Another())


# -- folders and files ------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_read(tmp_path: Path) -> None:
    trained(memory_budget="min", plan_dir=tmp_path)
    (path,) = tmp_path.glob("*.plan.json")
    path.unlink()
    path.mkdir()
    torch.compiler.reset()
    with pytest.raises(PlanMismatchError, match="cannot be read"):
        trained(memory_budget="min", plan_dir=tmp_path)


@pytest.mark.parametrize("narrowed", [[], ["relu"]])
def test_a_plan_of_a_version_that_could_save_values_in_fewer_bits(narrowed: list[str], tmp_path: Path) -> None:
    """Such a plan's file has a field for these values: if the field is empty the plan is replayed, else refused."""
    trained(memory_budget="min", plan_dir=tmp_path)
    (path,) = tmp_path.glob("*.plan.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "narrowed": narrowed}))
    torch.compiler.reset()
    compile_remat.reset_reports()
    if narrowed:
        with pytest.raises(
            PlanMismatchError, match=f"{path.name} is not a plan of this version: .*fewer bits.* Delete it"
        ):
            trained(memory_budget="min", plan_dir=tmp_path)
        return
    trained(memory_budget="min", plan_dir=tmp_path)
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.plan.status is Status.REPLAYED


@pytest.mark.parametrize(
    ("again", "added", "said"), [(True, [], "a second time and saves it"), (False, ["no_such_value"], "no_such_value")]
)
def test_a_plan_that_this_graph_cannot_have(again: bool, added: list[str], said: str, tmp_path: Path) -> None:
    trained(memory_budget="max", plan_dir=tmp_path)
    (path,) = tmp_path.glob("*.plan.json")
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "saved": plan["saved"] + added, "again": plan["saved"] * again}))
    torch.compiler.reset()
    with pytest.raises(PlanMismatchError, match=rf"{path.name}(.|\n)*{said}"):
        trained(memory_budget="max", plan_dir=tmp_path)


def test_a_plan_above_the_budget_is_obeyed_with_a_warning(tmp_path: Path) -> None:
    trained(memory_budget="max", plan_dir=tmp_path)
    torch.compiler.reset()
    compile_remat.reset_reports()
    with pytest.warns(PlannerWarning, match="pinned plan .* above the budget"):
        trained(memory_budget=0.7, plan_dir=tmp_path)
    (report,) = compile_remat.reports()
    assert report.plan is not None and report.budget_bytes is not None
    assert (report.plan.status, report.plan.is_feasible) == (Status.REPLAYED, False)
    assert report.plan.peak_bytes > report.budget_bytes
    assert "pinned plan" in report.message


@pytest.mark.parametrize("name", ["taken", "a" * 5000])
def test_folders_that_cannot_be_written_do_not_stop_training(name: str, tmp_path: Path) -> None:
    """One warning for each folder, however many graphs and steps would write into it."""
    (tmp_path / "taken").write_text("a file")
    taken = tmp_path / name
    cause = r"\((Not a directory|File name too long)\); training goes on, .*What to do: set "
    with pytest.warns(PlannerWarning) as said, compile_remat.measured_step():
        for memory_budget in ("min", "max"):
            trained(memory_budget=memory_budget, plan_dir=taken / "plans", report_dir=taken / "reports")
            torch.compiler.reset()
    texts = sorted(str(warning.message) for warning in said if issubclass(warning.category, PlannerWarning))
    assert len(texts) == 2
    for text, setting in zip(texts, ("plan", "report"), strict=True):
        folder = re.escape(str(taken / f"{setting}s"))
        assert re.fullmatch(
            f"compile_remat: {setting}_dir: {folder} cannot be written {cause}{setting}_dir to .*", text
        )
    assert "FALLBACK" not in {report.status for report in compile_remat.reports()}


@pytest.mark.parametrize("setting", ["plan_dir", "report_dir"])
def test_a_folder_that_is_no_path_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} = .* is not a path"):
        trained(**{setting: "a\0b"})


# -- models and inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_call_without_any_tensor(compiler: str) -> None:
    call = torch.compile(lambda: torch.ones(3) * 2, backend=remat, options={"compiler": compiler})
    torch.testing.assert_close(call(), torch.full((3,), 2.0))
    assert compile_remat.reports() == []


def test_a_call_whose_only_tensors_are_parameters() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 64))

        def forward(self, times: int) -> torch.Tensor:
            return torch.sin(torch.exp(self.weight) * times)

    model = Alone()
    call = torch.compile(model, backend=remat, options={"memory_budget": "min", "compiler": "eager"})
    (actual,) = torch.autograd.grad(call(3).sum(), model.weight)
    (expected,) = torch.autograd.grad(model(3).sum(), model.weight)
    torch.testing.assert_close(actual, expected)
    assert len([r for r in compile_remat.reports() if r.status != "NOT_PLANNED"]) == 1


def test_training_and_inference_of_one_model_take_turns() -> None:
    model, x = model_and_input()
    call = torch.compile(model, backend=remat, options={"memory_budget": "min", "compiler": "eager"})
    expected = train(model, model, x)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(call(x), expected[0])
        torch.testing.assert_close(train(call, model, x), expected, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(call(x), expected[0])
    assert len([r for r in compile_remat.reports() if r.status != "NOT_PLANNED"]) == 1


def test_an_error_of_the_model_stays_the_models() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)

    with pytest.raises(Exception, match=r"reduction dim|mat1 and mat2") as caught:
        torch.compile(fails, backend=remat, options={"compiler": "eager"}, fullgraph=True)(torch.ones(2, 2))
    assert not isinstance(caught.value, compile_remat.RematError)


# -- failures of ours -------------------------------------------------------------------------------------------------


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("no figures")


class FailingCost:
    """A cost model that breaks whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        return broken


SEAMS = {
    "cost model": (settings, "make_cost_model", lambda *args, **kwargs: FailingCost()),
    "problem": (joint_problem.ProblemBuilder, "build", broken),
    "search": (joint_planning.Planner, "lowest", broken),
    "extraction": (joint_split, "extract", broken),
    "device": (settings, "detect", broken),
}


@pytest.mark.parametrize(
    ("seam", "compiler"),
    [
        *((seam, "eager") for seam in SEAMS),
        pytest.param("cost model", "inductor", marks=pytest.mark.full),
        pytest.param("device", "inductor", marks=pytest.mark.proof),
    ],
)
def test_a_failure_of_ours_never_stops_training(seam: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, replacement = SEAMS[seam]
    model, x = model_and_input()
    expected = train(model, model, x)
    monkeypatch.setattr(place, name, replacement)
    call = torch.compile(model, backend=remat, options={"memory_budget": "min", "compiler": compiler})
    with pytest.warns(PlannerWarning, match="the planner failed"):
        actual = train(call, model, x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    (report,) = compile_remat.reports()
    assert (report.status, report.budget) == ("FALLBACK", "min")
    assert "the planner failed" in report.message
    assert (report.plan is not None) is (seam in ("search", "extraction", "device"))
    if report.plan is not None:
        assert report.plan.status is Status.FALLBACK
        assert [name.partition("_")[0] for name in report.plan.saved] == ["tanh"] * 4


def test_a_fallback_says_what_it_comes_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = model_and_input()
    plain = compile_remat.explain(model, x, memory_budget="max")
    base = compile_remat.explain(model, x, memory_budget=0.5).plain
    assert base is not None
    monkeypatch.setattr(joint_planning.Planner, "within", broken)
    options = {
        "memory_budget": 0.5,
        "compiler": "eager",
        "report_dir": str(tmp_path),
        "plan_dir": str(tmp_path / "plans"),
    }
    with pytest.warns(PlannerWarning):
        train(torch.compile(model, backend=remat, options=options), model, x)
    (report,) = compile_remat.reports()
    assert report.plan is not None and plain.plan is not None
    assert (report.graph_key, report.plan.saved) == (plain.graph_key, plain.plan.saved)
    assert report.predicted_peak_bytes == plain.predicted_peak_bytes
    assert report.budget_bytes == base.peak_bytes // 2 and not report.plan.is_feasible
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["plan"]["status"] == "FALLBACK"
    assert not (tmp_path / "plans").exists()  # a fallback is never pinned


def test_a_fallback_is_not_stored_for_the_planner(own_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's cache the fallback has a key of its own: it is found again while the planner fails, and not afterwards."""
    model, x = model_and_input(2)
    seen = []
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for fails in (True, True, False, False):
            torch.compiler.reset()
            compile_remat.reset_reports()
            with monkeypatch.context() as patch:
                if fails:
                    patch.setattr(joint_planning.Planner, "lowest", broken)
                with pytest.warns(PlannerWarning) if fails else contextlib.nullcontext():
                    train(torch.compile(model, backend=remat, options={"memory_budget": "min"}), model, x)
            (report,) = compile_remat.reports()
            seen.append((report.status == "FALLBACK", report.from_cache))
    assert seen == [(True, False), (True, True), (False, False), (False, True)]
