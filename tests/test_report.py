"""Reports as text and as JSON."""

import dataclasses
import json
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

import compile_remat
from compile_remat.passes import LiveBuffer, Plan, PlanOption, Status
from compile_remat.report import Report, amend, floor_text, latest, record, recording, write, write_to

MIB = 1 << 20
PLAN = Plan(
    problem_key="0123456789abcdef",
    status=Status.FEASIBLE,
    budget_bytes=8 * MIB,
    saved=("mm", "relu"),
    recomputed=("sin",),
    peak_bytes=7 * MIB,
    forward_peak_bytes=5 * MIB,
    saved_bytes=3 * MIB,
    once_time_ns=10_000_000,
    recompute_time_ns=500_000,
    extra_time_ns=400_000,
    bound_time_ns=300_000,
    largest=(LiveBuffer("mm", 2 * MIB, (512, 1024), "float32", "0.proj", "model.py:12", "saved"),),
    simulations=17,
)
REPORT = Report(PLAN.problem_key, "8MiB", 8 * MIB, PLAN, 6 * MIB, 0.125, "something to note", module="GPT")


def test_the_text() -> None:
    assert_expected_inline(
        str(REPORT),
        """\
GPT, memory_budget 8MiB
Plan
  status          feasible: fits the budget; the gap says how much faster another plan could be at most
  budget          8.0 MiB
  predicted peak  7.0 MiB (forward 5.0 MiB)
  saved           3.0 MiB in 2 tensors
  recomputed      1 values, 500 us (4.8% of the step); saving takes 0.0 ns (the fastest plan: 100 us for both)
  step            10.5 ms, the fastest plan 10.1 ms (estimated)
  extra time      400 us (+3.96%)
  lower bound     300 us (+2.97%), gap 0.99%
  largest at the peak:
       2.0 MiB  float32[512, 1024]  mm (saved)  0.proj (model.py:12)
  lowest reachable peak 6.0 MiB
  planned in 0.12 s
  note: something to note
  graph           0123456789abcdef""",
    )


def test_the_text_is_ascii_and_leaves_out_what_is_not_known() -> None:
    bare = dataclasses.replace(REPORT, floor_bytes=None, message="")
    assert str(bare).isascii() and str(REPORT).isascii()
    assert "lowest reachable" not in str(bare)
    assert "note" not in str(bare)


def test_the_lowest_peak_has_a_bound_and_a_gap() -> None:
    assert floor_text(6 * MIB, PLAN) == floor_text(6 * MIB, None) == "6.0 MiB"
    bounded = dataclasses.replace(PLAN, least_peak_bytes=5 * MIB)
    assert floor_text(6 * MIB, bounded) == "6.0 MiB (found), peak bound 5.0 MiB (proven; gap 20.0%)"
    assert "5.0 MiB (proven; no plan is lower)" in str(bounded)


OFFER_FIGURES = {"held_bytes": 3, "forward_peak_bytes": 4, "peak_bytes": 5, "time_ns": 6, "kept_output_bytes": 1}


def test_json_holds_everything() -> None:
    report = dataclasses.replace(REPORT, offers=(PlanOption(("mm",), **OFFER_FIGURES),))
    data = json.loads(report.to_json())
    assert {name: data[name] for name in data if name != "plan"} == {
        "graph_key": "0123456789abcdef",
        "budget": "8MiB",
        "budget_bytes": 8 * MIB,
        "floor_bytes": 6 * MIB,
        "planning_time_s": 0.125,
        "message": "something to note",
        "caveat": "",
        "from_cache": False,
        "check": "",
        "observed_peak_bytes": None,
        "rounds": 1,
        "scheduled_peak_bytes": None,
        "reserved_peak_bytes": None,
        "required_peak_bytes": None,
        "measured_peak_bytes": None,
        "measured_in_first_call": False,
        "offers": [{"saved": ["mm"], **OFFER_FIGURES}],
        "left_bytes": None,
        "estimated_ops": [],
        "inlined_calls": 0,
        "plain": None,
        "num_early": 0,
        "early_bytes": 0,
        "num_snapshots": 0,
        "snapshot_bytes": 0,
        "snapshot_time_ns": 0,
        "inputs_beyond_plain": [],
        "inputs_as_plain": [],
        "size_range": None,
        "region": 0,
        "runs_now": True,
        "step_peak_bytes": None,
        "step_budget_bytes": None,
        "module": "GPT",
    }
    assert Plan.from_json(json.dumps(data["plan"])) == PLAN
    assert Report.from_json(report.to_json()) == report


def test_operators_that_were_estimated_are_named() -> None:
    report = dataclasses.replace(REPORT, estimated_ops=("aten.sort.default", "mine.custom.default"))
    assert "\n  estimated by bytes alone: aten.sort.default, mine.custom.default\n" in str(report)
    assert Report.from_json(report.to_json()) == report
    older = json.loads(report.to_json())
    del older["estimated_ops"]
    assert Report.from_json(json.dumps(older)).estimated_ops == ()


def test_a_report_with_fields_that_are_gone_is_read() -> None:
    older = json.loads(REPORT.to_json())
    older |= {"spared_bytes": 0, "plan": {**older["plan"], "narrowed": []}}
    assert Report.from_json(json.dumps(older)) == REPORT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {}}', '{"plan": null, "colour": 1}'])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        Report.from_json(text)


def test_a_report_without_a_plan_is_a_fallback() -> None:
    bare = dataclasses.replace(REPORT, plan=None, floor_bytes=None, message="the planner failed")
    assert Report.from_json(bare.to_json()) == bare
    assert bare.status == "FALLBACK"
    figures = ("predicted_peak_bytes", "step_time_ns", "recompute_time_ns", "extra_time_ns", "lower_bound_time_ns")
    assert {getattr(bare, name) for name in (*figures, "gap", "num_saved", "num_recomputed")} == {None}
    assert_expected_inline(
        str(bare),
        """\
GPT, memory_budget 8MiB
No plan
  status          fallback: torch's own choice, because the planner failed
  planned in 0.12 s
  note: the planner failed
  graph           0123456789abcdef""",
    )


def test_figures_are_the_plans() -> None:
    assert REPORT.predicted_peak_bytes == 7 * MIB
    assert (REPORT.step_time_ns, REPORT.recompute_time_ns) == (10_500_000, 500_000)
    assert (REPORT.extra_time_ns, REPORT.lower_bound_time_ns) == (400_000, 300_000)
    assert REPORT.gap == pytest.approx(0.01)
    assert (REPORT.status, REPORT.num_saved, REPORT.num_recomputed) == ("FEASIBLE", 2, 1)


def test_the_text_says_that_a_plan_is_an_earlier_compilations() -> None:
    assert "planned in 0.12 s, now taken from the cache" in str(dataclasses.replace(REPORT, from_cache=True))


def test_predicted_scheduled_and_measured_side_by_side() -> None:
    report = dataclasses.replace(REPORT, scheduled_peak_bytes=9 * MIB, measured_peak_bytes=8 * MIB)
    assert (report.prediction_error, report.schedule_error) == (-0.125, 0.125)
    assert "  predicted peak  7.0 MiB" in str(report)
    assert "  scheduled peak  9.0 MiB" in str(report)
    assert "  measured peak   8.0 MiB (predicted -12.5%, scheduled +12.5%)" in str(report)
    assert Report.from_json(report.to_json()) == report
    unscheduled = dataclasses.replace(report, scheduled_peak_bytes=None)
    assert "8.0 MiB (predicted -12.5%)" in str(unscheduled) and unscheduled.schedule_error is None
    unplanned = dataclasses.replace(unscheduled, plan=None)
    assert str(unplanned).splitlines()[-4].endswith("8.0 MiB") and unplanned.prediction_error is None
    assert REPORT.prediction_error is None and "measured" not in str(REPORT)


def test_what_the_allocator_reserves_stands_beside_what_is_allocated() -> None:
    report = dataclasses.replace(REPORT, scheduled_peak_bytes=9 * MIB, reserved_peak_bytes=22 * MIB)
    assert "  scheduled peak  9.0 MiB\n  reserved peak   22.0 MiB" in str(report)
    assert "reserved" not in str(REPORT)


def test_the_latest_report_of_a_graph_is_amended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    compile_remat.reset_reports()
    assert latest(REPORT.graph_key) is None
    other = dataclasses.replace(REPORT, graph_key="other")
    for report in (REPORT, dataclasses.replace(REPORT, message="newer"), other):
        record(report)
    newer = latest(REPORT.graph_key)
    assert newer is not None and newer.message == "newer"
    amend(newer, str(tmp_path), measured_peak_bytes=5)
    assert [report.measured_peak_bytes for report in compile_remat.reports()] == [None, 5, None]
    (path,) = tmp_path.iterdir()
    assert Report.from_json(path.read_text()) == compile_remat.reports()[1]
    compile_remat.reset_reports()


def test_a_report_is_written_under_its_graph_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    write(REPORT, str(tmp_path / "a" / "b"))
    (path,) = (tmp_path / "a" / "b").iterdir()
    assert path.name == "0123456789abcdef.rank3.json"
    assert Report.from_json(path.read_text()) == REPORT


def test_what_a_failed_compilation_recorded_is_dropped() -> None:
    compile_remat.reset_reports()
    with pytest.raises(ZeroDivisionError), recording() as recorded:
        record(REPORT)
        assert recorded == [REPORT]
        raise ZeroDivisionError
    assert compile_remat.reports() == []
    with recording():
        record(REPORT)
        assert compile_remat.reports() == []
    assert compile_remat.reports() == [REPORT]


def test_recorded_in_order_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_remat.reset_reports()
    monkeypatch.delenv("RANK", raising=False)
    other = dataclasses.replace(REPORT, graph_key="other")
    record(REPORT)
    write_to(str(tmp_path / "a" / "b"))
    record(other)
    write_to(None)
    listed = compile_remat.reports()
    assert listed == [REPORT, other]
    listed.clear()  # a copy: nobody else's list changes
    assert compile_remat.reports() == [REPORT, other]
    (path,) = (tmp_path / "a" / "b").iterdir()
    assert path.name == "other.rank0.json"
    assert json.loads(path.read_text())["graph_key"] == "other"
    compile_remat.reset_reports()
    assert compile_remat.reports() == []


def test_a_page_begins_with_the_module_and_ends_with_the_hash() -> None:
    for report in (REPORT, dataclasses.replace(REPORT, plan=None)):
        figures = report.figures()
        assert figures.title == "GPT, memory_budget 8MiB"
        assert [name for name, _ in figures.facts].count("graph") == 1
        assert figures.facts[-1] == ("graph", "0123456789abcdef")
