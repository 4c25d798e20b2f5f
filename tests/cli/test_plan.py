"""`compile-remat plan`, `pareto` and `explain` in this process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from compile_remat import cli
from compile_remat._util.units import format_bytes
from compile_remat.cli import plan
from compile_remat.forecast import forecasting
from compile_remat.forecast.baselines import OF_LAYERS
from compile_remat.forecast.max_batch import MaxBatch
from compile_remat.passes import Planner, Problem
from tests.pages.test_allocator_snapshot import peak_and_end

MODEL = ["tests.planned_models:llama", "--device", "h100-sxm", "--dtype", "bf16", "--estimate"]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_can_spawn", lambda: False)


def test_plan_prints_what_training_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *MODEL, "--budget", "0.8", "--compare"]) == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "loading torch" and "searching for a plan" in progress
    for row in ("parameters", "optimizer state (adamw)", "region peak", "lowest reachable", "sum", "largest batch"):
        assert any(line.strip().startswith(row) for line in text.splitlines()), row
    assert "every layer checkpointed" in text and "torch's chooser, budget 0.5" in text
    assert "largest advantage" in text and "smallest" in text
    assert "extra time: beyond the step of plain torch.compile; below 0: the plan is faster" in text
    assert "(estimate)" in text and "ESTIMATE, by rules and not from lowered graphs: that was asked for" in text


def test_what_needs_layers_is_said_to_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "tests.planned_models:convolution",
        "--device",
        "h100-sxm",
        "--estimate",
        "--compare",
        "--no-largest-batch",
    ]
    assert cli.main(["plan", *given]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    without = [parts[1] for parts in lines if "no layers" in [part.strip() for part in parts]]
    assert len(without) == len(OF_LAYERS)
    assert all(name.startswith(shown) for name, shown in zip(OF_LAYERS, without, strict=True))  # long names are wrapped


def test_plan_with_early_gradients_has_a_lower_floor_and_the_optimizers_workspace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for gradients in ("end", "early"):
        given = ["--json", "--no-largest-batch", "--budget", "min", "--gradients", gradients]
        assert cli.main(["plan", *MODEL, *given]) == 0
        found[gradients] = json.loads(capsys.readouterr().out)
    assert found["early"]["floor_bytes"] < found["end"]["floor_bytes"]
    assert 0 < found["early"]["optimizer_workspace_bytes"] < found["end"]["optimizer_workspace_bytes"]


def test_plan_with_inputs_that_stay_has_no_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for inputs in ("as_plain", "constant"):
        given = ["--json", "--no-largest-batch", "--budget", "min", "--inputs", inputs]
        assert cli.main(["plan", "tests.planned_models:convolution", "--device", "h100-sxm", "--estimate", *given]) == 0
        found[inputs] = json.loads(capsys.readouterr().out)["plan"]["saved"]
    assert {value: any("snapshot" in name for name in saved) for value, saved in found.items()} == {
        "as_plain": True,
        "constant": False,
    }


WORDS = ["tests.planned_models:llama_of_many_words", "--device", "h100-sxm"]


def test_plan_with_rows_in_slices_where_the_budget_needs_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for slices, budget in (("off", "min"), ("8", "min"), ("auto", "max"), ("auto", "64GiB")):
        given = ["--json", "--no-largest-batch", "--budget", budget, "--slices", slices]
        assert cli.main(["plan", *WORDS, *given]) == 0
        found[slices, budget] = json.loads(capsys.readouterr().out)
    whole, sliced = found["off", "min"], found["8", "min"]
    assert 8 in [product["slices"] for product in sliced["plan"]["sliced"]]
    assert sliced["plan"]["peak_bytes"] == sliced["floor_bytes"] < 0.9 * whole["floor_bytes"]
    assert not found["auto", "max"]["plan"]["sliced"] and not found["auto", "64GiB"]["plan"]["sliced"]


def test_a_budget_below_the_whole_graphs_floor_is_met_in_slices(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--no-largest-batch", "--budget", "7MiB"]
    assert cli.main(["plan", *WORDS, *given]) == 2
    assert "no plan fits memory_budget = 7MiB" in capsys.readouterr().err
    assert cli.main(["plan", *WORDS, *given, "--slices", "auto"]) == 0
    assert "rows in slices" in capsys.readouterr().out


@pytest.mark.parametrize("others", [["--devices", "h100-sxm,l4"], ["--device", "h100-sxm", "--mesh", "dp=8"]])
def test_slices_are_for_one_device(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", WORDS[0], *others, "--slices", "auto"]) != 0
    assert "--slices" in capsys.readouterr().err


@pytest.mark.proof
def test_plan_as_json_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--json", "--no-largest-batch", "--batch", "3", "--seq", "64", "--optimizer", "sgd"]
    assert cli.main(["plan", *MODEL, *given]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sizes"] == {"batch": 3, "seq": 64} and data["dtype"] == "bf16"
    assert data["optimizer_bytes"] == data["parameter_bytes"] and data["largest_batch"] is None


def test_what_does_not_fit_has_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *MODEL, "--optimizer", "90GiB"]) == 1
    text = capsys.readouterr().out
    assert "none: parameters, gradients and the optimizer alone need" in text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["llama-3", "--device", "h100-sxm"], "is no model that can be built"),
        ([*MODEL, "--budget", "8"], "has no unit"),
        (["tests.planned_models:llama", "--device", "h101"], "no such device"),
        ([*MODEL, "--budget", "100KiB"], "no plan fits"),
        ([*MODEL, "--budget", "100KiB", "--time-limit", "1e-9"], "a larger time_limit may find a plan that fits"),
        (
            [*MODEL, "--time-limit", "soon"],
            "time_limit = 'soon' (from --time-limit): 'soon' is not a choice. Allowed: a number",
        ),
        ([*MODEL, "--time-limit", "0"], "Allowed: a number of seconds above 0, up to 1000000, or none."),
    ],
)
def test_errors_are_one_message(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *given, *["--no-largest-batch"]]) == 2
    assert text in capsys.readouterr().err


def test_pareto_prints_a_frontier(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pareto", *MODEL, "--points", "4", "--json"]) == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines() == ["loading torch", f"tracing {MODEL[0]}", "searching for the frontier"]
    plans = json.loads(text)
    assert 2 <= len(plans) <= 4
    assert {p["facts"] for p in plans} == {"estimated"} and all(p["why"] for p in plans)
    assert [p["peak_bytes"] for p in plans] == sorted((p["peak_bytes"] for p in plans), reverse=True)
    assert cli.main(["pareto", *MODEL, "--points", "3"]) == 0
    assert "region peak" in capsys.readouterr().out


@pytest.mark.full
def test_pareto_prints_what_waits_on_the_host_and_draws_both_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    given = ["pareto", *MODEL, "--batch", "256", "--points", "3", "--offload", "auto"]
    assert cli.main([*given, "--html", str(page), "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans[-1]["offloaded"] and plans[-1]["offloaded_bytes"] and plans[-1]["stall_time_ns"]
    assert 'id="without"' in page.read_text() and "move nothing to host memory" in page.read_text()
    assert cli.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("on the host" in line and "copies prolong the step by" in line for line in lines)


def test_each_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, png, svg = (tmp_path / name for name in ("page.html", "frontier.png", "frontier.svg"))
    given = [*MODEL, "--budget", "0.8", "--json", "--html", str(page)]
    assert cli.main(["explain", *given]) == 0
    text, progress = capsys.readouterr()
    assert progress.splitlines()[0] == "loading torch" and "searching for a plan" in progress
    explained = json.loads(text)
    assert format_bytes(explained["peak_bytes"]) in page.read_text() and "on h100-sxm" in page.read_text()
    page.unlink()
    assert cli.main(["plan", *given, "--no-largest-batch"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert {**planned["plan"], "facts": "estimated", "why": planned["why"]} == explained
    assert f"plain torch.compile {format_bytes(planned['plain_peak_bytes'])}" in page.read_text()
    page.unlink()
    pytest.importorskip("matplotlib")
    assert cli.main(["pareto", *given, "--points", "3", "--png", str(png), "--svg", str(svg)]) == 0
    out, err = capsys.readouterr()
    lowest = json.loads(out)[-1]
    assert "this plan" in page.read_text() and format_bytes(lowest["peak_bytes"]) in page.read_text()
    assert png.read_bytes()[:4] == b"\x89PNG" and "<svg" in svg.read_text()
    assert err.count("wrote ") == 3


@pytest.mark.parametrize("command", [["explain"], ["plan", "--no-largest-batch"]], ids=["explain", "plan"])
def test_traces_have_the_peak_of_the_plan(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, snapshot = tmp_path / "trace.json", tmp_path / "snapshot.pickle"
    given = [*MODEL, "--json", "--chrome-trace", str(trace), "--memory-snapshot", str(snapshot)]
    assert cli.main([*command, *given]) == 0
    printed = json.loads(capsys.readouterr().out)
    peak_bytes = printed.get("plan", printed)["peak_bytes"]
    live = [e["args"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "live bytes"]
    assert max(sum(areas.values()) for areas in live) == peak_bytes
    assert peak_and_end(pickle.loads(snapshot.read_bytes()))[0] == peak_bytes


def test_a_page_that_cannot_be_written_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["explain", *MODEL, "--html", str(tmp_path / "file" / "page.html")]) == 2
    assert "page.html cannot be written" in capsys.readouterr().err


def test_a_page_does_not_change_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plans = []
    for page in ([], ["--html", str(tmp_path / "page.html")]):
        assert cli.main(["explain", *MODEL, "--budget", "1500KiB", "--json", *page]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]


@pytest.mark.proof
def test_explain_names_the_largest_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *MODEL, "--budget", "min"]) == 0
    text = capsys.readouterr().out
    assert "largest at the peak" in text and "lowest reachable peak" in text and "planned_models.py:" in text
    assert "(found), peak bound " in text and "(proven; no plan is lower)" in text


@pytest.mark.parametrize(
    ("given", "limit"), [([], None), (["--time-limit", "2.5"], 2.5), (["--time-limit", "none"], None)]
)
@pytest.mark.parametrize("command", ["plan", "pareto", "explain"])
def test_every_search_has_the_limit(
    command: str, given: list[str], limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []
    init = Planner.__init__

    def seen(
        self: Planner, problem: Problem, work_seconds: float | None = None, *others: object, **named: object
    ) -> None:
        limits.append(work_seconds)
        init(self, problem, work_seconds, *others, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "__init__", seen)
    assert cli.main([command, *MODEL, *given]) == 0
    assert set(limits) == {limit} and (len(limits) > 3) == (command == "plan")


def test_a_search_that_ended_at_its_limit_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *MODEL, "--budget", "min", "--time-limit", "1e-9", "--no-largest-batch"]) == 0
    assert "note: the search for a plan ended at its limit of work (time_limit)" in capsys.readouterr().out


def test_a_module_of_the_working_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\ndef build(batch=2):\n    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)\n"
    (tmp_path / "model_of_mine.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "model_of_mine:build", "--device", "a100-40gb"]) == 0
    assert "predicted peak" in capsys.readouterr().out


def test_the_plan_and_its_page_are_there_before_the_largest_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, seen = tmp_path / "p\u00e4ge.html", list[tuple[str, bool]]()

    def found(*_: object) -> MaxBatch:
        seen.append((capsys.readouterr().out, page.exists()))
        return MaxBatch(7, why="")

    monkeypatch.setattr(forecasting, "largest_batch", found)
    given = ["--budget", "0.8", "--compare", "--html", str(page)]
    assert cli.main(["plan", *MODEL, *given]) == 0
    ((before, has_page),) = seen
    assert has_page and before.index("region peak") < before.index("every layer checkpointed")
    lines = before.splitlines()
    assert len(lines) > 20 and max(len(line) for line in lines if line.startswith("  ") or "of it" in line) <= 80
    assert "largest batch" not in before and "largest batch" in capsys.readouterr().out


def test_the_largest_batch_of_a_tiny_model_says_why_it_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    said = "the search ends at 2,147,483,647 samples, the most rows that cuBLAS takes; the device has room for more"
    given = ["plan", "tests.planned_models:one_number", "--device", "b200", "--estimate"]
    assert cli.main(given) == 0
    assert f"largest batch  2147483647 (16.0 GiB, +0.00%): {said}\n" in capsys.readouterr().out
    assert cli.main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["largest_batch"]["why"] == said


def test_a_full_disk_does_not_cost_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(forecasting.Forecast, "to_html", full)
    assert cli.main(["plan", *MODEL, "--no-largest-batch", "--html", "page.html"]) == 2
    out, err = capsys.readouterr()
    assert "lowest reachable" in out
    assert err.splitlines()[-1] == "compile-remat plan: page.html cannot be written (No space left on device)"


def test_a_batch_for_which_nothing_is_left_says_what_takes_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "tests.planned_models:convolution",
        "--device",
        "t4",
        "--estimate",
        "--batch",
        "99999999",
        "--no-largest-batch",
    ]
    assert cli.main(["plan", *given]) == 1
    out, err = capsys.readouterr()
    (note,) = (line for line in out.splitlines() if line.startswith("note:"))
    assert "warning" not in err and "allows nothing, which is less than the lowest reachable peak" in note
    assert "the memory that t4 has left of " in note and "beside parameters (" in note and " and inputs (" in note
