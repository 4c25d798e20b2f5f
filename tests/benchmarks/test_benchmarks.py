"""The benchmarks at toy size: models, verdicts, and the commands."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import (
    gap,
    max_speed,
    models,
    planning_time,
    promise,
    scale,
    search_share,
    together,
    workspaces,
)
from benchmarks.common import harness, synthetic
from benchmarks.common.harness import MIB
from benchmarks.common.phases import REST
from benchmarks.common.result_rows import Row
from benchmarks.common.runner import floor_text
from benchmarks.common.timing import RatioInterval
from compile_remat.passes import Planner, Problem, Status


@pytest.mark.parametrize("name", models.CASES)
def test_every_model_trains_and_is_reproducible(name: str) -> None:
    first, second = (models.build(name, scale=models.TOY_SCALE) for _ in range(2))
    losses = []
    for case in (first, second):
        torch.manual_seed(1)
        loss = harness.Training.loss(case.module(*case.inputs))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert all(parameter.grad is not None for parameter in first.module.parameters())
    assert first.note


def test_full_sizes_are_those_of_the_published_table() -> None:
    gpt, chain = models.build("gpt"), models.build("chain256")
    assert gpt.inputs[0].shape == (8, 256, 256)
    assert len(gpt.module) == 12  # type: ignore[arg-type]
    assert chain.inputs[0].shape == (2048, 256)
    assert len(chain.module) == 200  # type: ignore[arg-type]
    assert sum(p.nbytes for p in models.build("chain1024").module.parameters()) == 100 * (1024 * 1024 + 1024) * 4


def test_unknown_model_and_scale_are_refused() -> None:
    with pytest.raises(ValueError, match="there are: gpt, chain256"):
        models.build("gtp")
    with pytest.raises(ValueError, match="scale"):
        models.build("gpt", scale=0.0)


def test_the_floor_is_compared_with_the_measured_minimum() -> None:
    rows = [Row("gpt", "plain", "default", peak_bytes=100 * MIB), Row("gpt", "remat", "min", peak_bytes=30 * MIB)]
    text = floor_text(Row("gpt", "remat", "0.2", budget_bytes=20 * MIB, floor_bytes=int(30.3 * MIB)), rows)
    assert text == "floor 30.3 (min 30.0, off +1.0%)"


def test_max_verdict() -> None:
    same = RatioInterval(1.0, 0.99, 1.01, 30, 100, 100)
    row = max_speed.MaxRow("gpt", 10_000, 10_009, RatioInterval(1.03, 1.02, 1.04, 30, 100, 103), same)
    assert row.verdict == "ok"
    assert replace(row, peak_bytes=10_011).verdict == "miss: peak above 1.001"
    assert replace(row, time=replace(same, low=1.021)).verdict == "miss: time above 1.02"


def test_ascii_table_aligns_its_columns() -> None:
    table = harness.ascii_table(["run", "MiB", "note"], [["plain", "100.5", "ok"], ["a", "1", ""]])
    assert table.splitlines() == ["run      MiB  note", "-----  -----  ----", "plain  100.5  ok", "a          1"]


def test_rows_come_from_files_and_from_processes(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    harness.write_json(path, {"torch": "2"}, [Row("gpt", "plain", "default")])
    assert harness.stored_rows(path, {}, lambda fields: Row(**fields)) == (
        {"torch": "2"},
        [Row("gpt", "plain", "default")],
    )
    assert harness.stored_rows(tmp_path / "absent.json", {"torch": "3"}, dict) == ({"torch": "3"}, [])
    path.write_text("{}")
    assert list(harness.rows_of_process(["json.tool", str(path)])) == [{}]
    with pytest.raises(RuntimeError, match="absent failed"):
        list(harness.rows_of_process(["json.tool", "absent"]))


@pytest.mark.full
def test_max_speed_command() -> None:
    pytest.importorskip("compile_remat.backend")
    assert max_speed.main(["--toy", "--model", "chain1024", "--pairs", "2"]) in (0, 1)


@pytest.mark.usefixtures("empty_kernels")
def test_all_benchmarks_have_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert everything.main(["scale", "--toy", "--json", str(tmp_path)]) in (0, 1)
    assert json.loads((tmp_path / "scale_cpu.json").read_text())["rows"]
    with pytest.raises(SystemExit):
        everything.main(["table_z"])
    assert "there are promise" in capsys.readouterr().err
    assert {*everything.NAMES, *everything.APART} == {
        path.stem for path in Path(everything.__file__).parent.glob("*.py") if "def main" in path.read_text()
    } - {"__main__"}


def _promise_rows() -> list[Row]:
    torch_rows = [Row("gpt", "torch", value, peak_bytes=peak) for value, peak in (("0.5", 200), ("0", 100))]
    ours = [
        Row("gpt", "remat", "0.8", budget_bytes=100, peak_bytes=99, predicted_peak_bytes=100, scheduled_peak_bytes=99),
        Row("gpt", "remat", "0.4", budget_bytes=20, floor_bytes=25),
        Row("gpt", "remat", "min", peak_bytes=25, predicted_peak_bytes=26, gradient_bytes=5),
    ]
    return [Row("gpt", "plain", "default", peak_bytes=120), *torch_rows, *ours]


def test_the_promise_is_summed_up() -> None:
    summary = promise.summarise(_promise_rows())
    assert summary.errors == [pytest.approx(1 / 99), pytest.approx(1 / 25)]
    assert summary.scheduled_errors == [0.0]
    assert summary.over == [] and summary.ratios == {"gpt": 0.25}
    assert summary.activation_ratios == {"gpt": pytest.approx(20 / 95)}
    assert [row.setting for row in summary.misses] == ["min"]  # 4 % off
    assert "above the budget: 0 of 2 rows" in str(summary)
    assert "min / torch's lowest: 0.25 in the geometric mean" in str(summary)


def test_a_broken_promise_is_a_miss() -> None:
    rows = _promise_rows()
    over = replace(rows[3], peak_bytes=101)
    assert promise.verdict(over, rows) == "miss: above the budget"
    assert promise.summarise([*rows[:3], over]).over == [over]
    assert promise.verdict(rows[4], rows).startswith("floor")
    assert promise.verdict(replace(rows[4], floor_bytes=27), rows).startswith("miss: floor")
    assert promise.verdict(replace(rows[4], floor_bytes=25, budget_bytes=26), rows).startswith("miss: floor")
    assert promise.verdict(rows[5], rows) == "miss: error above 3%"
    low = replace(rows[5], predicted_peak_bytes=25)
    assert promise.verdict(low, rows) == "0.25 of torch's lowest"
    high = replace(low, peak_bytes=101, predicted_peak_bytes=101)
    assert promise.verdict(high, rows) == "miss: above the peak of a larger budget; above torch's lowest"
    assert promise.verdict(replace(rows[5], failure="boom"), rows) == "miss: boom"


@pytest.mark.parametrize("holds", [False, True])
def test_a_step_holds_its_output_where_it_is_asked_to(holds: bool) -> None:
    module, outputs, held = torch.nn.Linear(4, 4), [], []

    def compiled(x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        outputs.append(weakref.ref(output))
        return output

    module.weight.register_hook(lambda _: held.append(outputs[0]() is not None))
    harness.Training(module, compiled, (torch.ones(2, 4),), holds_output=holds).step()
    assert held == [holds]


def test_a_step_in_bfloat16_takes_no_copy_in_float32_for_its_mean() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16))

        def forward(self) -> torch.Tensor:
            return self.weight * 2

    module = Doubled()
    run = harness.Training(module, module, ())
    assert harness.second_step_peak(run, "cpu").peak_bytes < 2.1 * module.weight.nbytes
    run.step()
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, torch.full_like(module.weight, 2 / module.weight.numel()))


@pytest.mark.full
def test_peaks_are_the_same_with_kernels_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "FRACTIONS", (0.8,))
    peaks = []
    for option in ([], ["--empty-kernels"]):
        out = tmp_path / f"{len(option)}.json"
        promise.main(
            ["--model", "bert", "--toy", "--only", "remat", "--dtype", "bfloat16", "--json", str(out), *option]
        )
        peaks.append([row["peak_bytes"] for row in json.loads(out.read_text())["rows"]])
    assert peaks[0] == peaks[1] and len(peaks[0]) == 3 and all(peaks[0])


@pytest.mark.usefixtures("empty_kernels")
def test_the_promise_at_toy_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "promise.json"
    monkeypatch.setattr(promise, "FRACTIONS", (0.8,))
    rivals = tmp_path / "rivals.json"
    monkeypatch.setattr(promise, "TORCH_BUDGETS", (0.01, 0.0))
    assert promise.main(["--model", "chain256", "--toy", "--only", "torch", "--json", str(rivals)]) == 0
    promise.main(["--model", "chain256", "--toy", "--rivals", str(rivals), "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["default", "0.01", "0", "0.8", "min"]
    assert rows[-1]["scheduled_peak_bytes"] > 0
    printed = capsys.readouterr().out
    assert "error of the prediction: median" in printed and "chain256+" in printed and "min / torch's lowest" in printed
    promise.main(["--show", str(out), "--show", str(out), "--json", str(rivals)])
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("chain256+")]
    assert f"{rows[3]['peak_bytes'] / 2**20:.1f}" in line.split()
    assert json.loads(rivals.read_text())["rows"] == rows * 2
    first, second = rows[1:3]  # an equal choice is measured once, and planned for each time
    assert first["first_step_s"] == second["first_step_s"] and first["planning_ns"] != second["planning_ns"]
    assert rows[0]["gradient_bytes"] == rows[-1]["gradient_bytes"] > 0


@pytest.mark.usefixtures("empty_kernels")
def test_rows_with_another_plan_by_now_are_listed_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setattr(promise, "FRACTIONS", (0.8,))
    promise.main(["--model", "chain256", "--toy", "--only", "remat", "--code-only", "--json", str(out)])
    stored = json.loads(out.read_text())
    again = ["--stale", str(out), "--toy", "--drop"]
    assert promise.main(again) == 0
    assert json.loads(out.read_text()) == stored
    _, met, least = stored["rows"]
    assert met["predicted_peak_bytes"] and least["extra_ns"] > 0
    least["extra_ns"] *= 1.001
    failed = {
        **met,
        "setting": "0.7",
        "failure": "TorchRuntimeError: no such operator",
    }  # planned again, it would fail again
    met["predicted_peak_bytes"], met["floor_bytes"] = None, 4
    stored["rows"].append(failed)
    out.write_text(json.dumps(stored))
    capsys.readouterr()
    assert promise.main(again) == 1
    assert json.loads(out.read_text())["rows"] == [stored["rows"][0], failed]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("extra_ns", "predicted_peak_bytes, floor_bytes", "2 of 2 rows differ"))
    stored["header"]["torch"] = "1.0"
    out.write_text(json.dumps(stored))
    with pytest.raises(SystemExit, match=r"is of torch 1\.0"):
        promise.main(again)


def test_verdicts_on_several_graphs() -> None:
    rows = [
        together.StepRow("apart", "default", first_peak_bytes=200, later_peak_bytes=200),
        together.StepRow("apart", "0.6", budget_bytes=120, first_peak_bytes=90, later_peak_bytes=120),
        together.StepRow("apart", "0.4", budget_bytes=80, first_peak_bytes=81, later_peak_bytes=80),
        together.StepRow("breaks", "0.4", budget_bytes=80, first_peak_bytes=81, later_peak_bytes=80),
        together.StepRow("apart", "0.3", budget_bytes=60, floor_bytes=61),
        together.StepRow("apart", "0.3", budget_bytes=82, floor_bytes=83),
        together.StepRow("apart", "0.3", budget_bytes=60, failure="KeyError: 70"),
        together.StepRow("apart", "min", first_peak_bytes=70, later_peak_bytes=81),
    ]
    assert [row.verdict for row in together.judge(rows)] == [
        "ok",
        "ok",
        "ok, the first step above",
        "miss: above the budget",
        "floor 0.0",
        "miss: an error although min stays inside",
        "miss: KeyError: 70",
        "miss: above the peak of a larger budget",
    ]


@pytest.mark.full
def test_several_graphs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "FRACTIONS", (0.8,))
    out = tmp_path / "together.json"
    assert together.main(["--case", "breaks", "--toy", "--json", str(out)]) == 0
    default, ours, lowest = json.loads(out.read_text())["rows"]
    assert ours["graphs"] >= 2 and ours["later_peak_bytes"] <= ours["budget_bytes"] < default["later_peak_bytes"]
    assert lowest["later_peak_bytes"] <= ours["later_peak_bytes"]


def test_workspaces_of_operators_that_are_called_and_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "workspaces.json"
    flags = ["--operator", "kthvalue", "--operator", "logsumexp", "--operator", "c2r", "--json", str(out)]
    assert workspaces.main(flags) == 0
    rows = {row["operator"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["aten.kthvalue"]["plan_bytes"] == rows["aten.kthvalue"]["beside_bytes"] > 0
    assert rows["aten.logsumexp"]["beside_bytes"] > 0 and not rows["aten.logsumexp"]["is_called"]
    assert rows["aten._fft_c2r of two dimensions"]["plan_bytes"] > rows["aten._fft_c2r"]["plan_bytes"] == 0
    assert "4 operators, 3 of them called" in capsys.readouterr().out


def test_the_gap_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, parts = tmp_path / "gap.json", ["--part", "models", "--part", "exact"]
    gap.main(["--model", "chain256", *parts, "--toy", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["models"] * len(gap.FRACTIONS) + ["exact"] * gap.POINTS
    assert all(row["bound"] <= row["exact"] <= row["extra"] for row in rows if row["exact"] is not None)
    assert all(0 < row["least_bytes"] <= row["floor_bytes"] for row in rows)
    printed = capsys.readouterr().out
    assert "budgets above the floor: gap within 1% at" in printed and "the plan is the fastest of all at" in printed


def test_gap_verdicts() -> None:
    full = gap.GapRow("models", "unet", 60, 100, 50, 40, 60, extra=0.05, bound=0.046, simulations=1, planning_s=0.1)
    wide = replace(full, bound=0.01)
    small = replace(full, kind="exact", exact=0.046, bound=0.0)
    assert [gap._verdict(row) for row in (full, small)] == ["ok", "ok"]
    assert gap._verdict(wide) == "miss: gap above 1%"
    assert gap._verdict(replace(small, exact=0.01)) == "miss: 4.0% above the optimum"
    assert gap._verdict(replace(small, peak_bytes=63)) == "miss: floor 5.00% above the lowest of all plans"
    assert gap._verdict(replace(full, budget_bytes=40)) == "below the floor"
    assert gap._verdict(replace(full, budget_bytes=55)) == "miss: no plan"
    assert gap.summary([full, wide]) == "2 budgets above the floor: gap within 1% at 1, median 2.2%, worst 4.0%"


@pytest.mark.parametrize("problem", [synthetic.equal_layers(3), synthetic.unequal_layers(3)], ids=["equal", "unequal"])
def test_synthetic_layers_are_what_a_planner_expects(problem: Problem) -> None:
    assert all(u < v for v, value in enumerate(problem.values) for u in value.reads)
    assert all(g < b for b, step in enumerate(problem.steps) for g in step.gradients)
    assert len({node.name for node in (*problem.values, *problem.steps)}) == len(problem.values) + len(problem.steps)
    assert len(problem.values) == 1 + 3 * synthetic.VALUES_PER_LAYER
    planner = Planner(problem)
    fastest, lowest = planner.fastest(), planner.lowest()
    assert lowest.peak_bytes < 0.8 * fastest.peak_bytes
    assert planner.within((lowest.peak_bytes + fastest.peak_bytes) // 2).status in (Status.FEASIBLE, Status.OPTIMAL)


def test_planning_time_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planning_time.json"
    options = ["--toy", "--model", "gpt", "--repeats", "1", "--points", "3", "--phases", "--json", str(out)]
    assert planning_time.main(options) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["points"] == 3 and all(
        row[name] > 0 for name in ("torch_s", "half_s", "min_s", "search_s", "frontier_s")
    )
    assert row["phases_s"].keys() == {*planning_time.PHASES, REST}
    printed = capsys.readouterr().out
    assert "0.5 over torch: median" in printed and "torch's own / torch" in printed


@pytest.mark.full
def test_the_search_s_share_at_toy_size() -> None:
    row = search_share.row_of("gpt", "0.5", is_toy=True)
    assert 0 < row.search_s < row.call_s and 0 < row.observed_s < row.call_s
    assert row.share > row.search_share and row.verdict
    assert "0.5, with observations: median" in search_share.summary([row])


def test_scale_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scale.json"
    assert scale.main(["--toy", "--kind", "unequal", "--points", "3", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["nodes"] for row in rows] == [61, 121]
    assert all(row["peak_bytes"] <= row["budget_bytes"] and row["extra"] >= row["bound"] for row in rows)
    assert all(row["planning_s"] > 0 and row["frontier_s"] > 0 for row in rows)
    assert "unequal" in capsys.readouterr().out
