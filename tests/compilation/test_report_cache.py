"""Files beside torch's cache: named by all that a plan depends on, and never worth a training run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from compile_remat.compilation import report_cache
from compile_remat.compilation.report_cache import Kept
from compile_remat.passes import Assumptions, PlainFacts, Planner
from compile_remat.passes.pictures.plan_pictures import PlanPictures
from compile_remat.passes.problem.facts import NOTHING_ASSUMED
from compile_remat.report import Report
from tests.oracles.random_problems import chain

PLAIN = PlainFacts(7, 9, (("v0", 7), ("v1", 5)), (("s0", 9),))
REPORT = Report("0123456789abcdef", "min", None, None, message="a fallback")
DOUBLE = torch.ones(4, 4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._functorch.config.patch(enable_autograd_cache=True):
        yield


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def renamed(other: torch.Tensor) -> torch.Tensor:
    return torch.sin(other) * 2


def another(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 3


def path_of(graph: fx.GraphModule, x: torch.Tensor = DOUBLE, uuid: object = "a", **options: Any) -> Path | None:
    return report_cache.path_of(lambda: report_cache.text_of(graph, [x]), uuid, options)


def named(
    function: Callable[..., Any] = plain, x: torch.Tensor | None = None, uuid: object = "a", **options: Any
) -> Path:
    graph = fx.symbolic_trace(function)
    path = path_of(graph, torch.ones(4, 4) if x is None else x, uuid, **options)
    assert path is not None
    return path


def test_the_name_is_stable_and_lies_beside_torchs_cache(tmp_path: Path) -> None:
    assert named() == named() == named(renamed)
    assert named().parent == tmp_path / "remat"


def test_the_name_changes_with_what_a_plan_depends_on() -> None:
    names = [
        named(),
        named(another),
        named(x=DOUBLE),
        named(x=torch.ones(4, 5)),
        named(x=torch.ones(4, 4).t()),
        named(x=torch.ones(4, 4, requires_grad=True)),
        named(uuid="b"),
        named(max_fusion_size=3),
    ]
    with torch.no_grad():
        names.append(named())
    with torch.autocast("cpu"):
        names.append(named())
    with torch._inductor.config.patch(fallback_random=True):
        names.append(named())
    assert len(set(names)) == len(names)


def test_a_users_tag_changes_the_name() -> None:
    graph = fx.symbolic_trace(plain)
    before = path_of(graph)
    next(n for n in graph.graph.nodes if n.target is torch.sin).meta["recompute"] = "must save"
    assert path_of(graph) != before


def test_without_torchs_cache_there_is_no_file() -> None:
    graph = fx.symbolic_trace(plain)
    assert path_of(graph, force_disable_caches=True) is None
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert path_of(graph) is None


def test_a_graph_that_cannot_be_named_has_no_file(caplog: pytest.LogCaptureFixture) -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise ValueError("no words")

    graph = fx.symbolic_trace(plain)
    next(iter(graph.graph.nodes)).meta["custom"] = Unspeakable()
    assert path_of(graph) is None
    assert "no name" in caplog.text


def test_what_was_stored_is_recalled_and_marked(tmp_path: Path) -> None:
    kept = Kept((REPORT, REPORT), 7, Assumptions(stored=(("mul", True),)).to_text(), (0, 2))
    report_cache.store(tmp_path / "a.json", kept)
    marked = dataclasses.replace(REPORT, from_cache=True)
    assert report_cache.recall(tmp_path / "a.json") == dataclasses.replace(kept, reports=(marked, marked))


def test_the_picture_of_a_plan_is_kept(tmp_path: Path) -> None:
    planner = Planner(chain(4))
    pictures = PlanPictures(planner.problem, planner.problem, observed=PLAIN, work_seconds=2.5)
    report = dataclasses.replace(REPORT, plan=dataclasses.replace(planner.lowest(), pictures=pictures))
    report_cache.store(tmp_path / "a.json", Kept((report, REPORT)))
    found, bare = report_cache.recall(tmp_path / "a.json").reports
    assert found.figures(3).step == report.figures(3).step is not None
    assert found.figures(3).frontier == report.figures(3).frontier and bare.figures().step is None
    report_cache.store(tmp_path / "b.json", Kept((found, bare)))
    again, _ = report_cache.recall(tmp_path / "b.json").reports
    assert again.figures().modules == report.figures().modules


def test_a_damaged_picture_is_an_error_of_who_looks(tmp_path: Path) -> None:
    planner = Planner(chain(2))
    plan = dataclasses.replace(planner.lowest(), pictures=PlanPictures(planner.problem))
    report = dataclasses.replace(REPORT, plan=plan)
    report_cache.store(tmp_path / "a.json", Kept((report,)))
    document = json.loads((tmp_path / "a.json").read_text())
    for damage in ("", "AAAA", "not base64", document["pictures"][0][:40]):
        (tmp_path / "a.json").write_text(json.dumps({**document, "pictures": [damage]}))
        (found,) = report_cache.recall(tmp_path / "a.json").reports
        with pytest.raises(ValueError, match="cannot be read"):
            found.figures()


def test_no_file_is_no_report_and_no_complaint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert report_cache.recall(tmp_path / "a.json") == Kept()
    assert caplog.text == ""


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", DEEP, f'{{"schema": {report_cache.SCHEMA}, "reports": {DEEP}}}'])
def test_a_damaged_file_is_a_warning(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_text(text)
    assert report_cache.recall(tmp_path / "a.json") == Kept()
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 0},
        {"reports": [{}]},
        {"reports": [5]},
        {"reports": None},
        {"pictures": None},
        {"pictures": []},
        {"written": [{}]},
        {"written": 3},
        {"next_bytes": "x"},
        {"next_bytes": 1e30},
        {"next_assumed": None},
        {"next_assumed": "x"},
        {"next_assumed": "[[],[],[]]"},
        {"next_assumed": '[[["mul",1]],[],[],[]]'},
        {"next_assumed": DEEP},
        {"unknown": 1},
    ],
)
def test_a_field_that_is_off_is_a_warning(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.json"
    report_cache.store(path, Kept((REPORT,), 7, NOTHING_ASSUMED.to_text(), (0,)))
    assert report_cache.recall(path).next_bytes == 7 and not caplog.records
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert report_cache.recall(path) == Kept()
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text


def test_without_another_plan_nothing_is_assumed_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file of a plan that was taken itself names no other plan, and is not damaged for that."""
    report_cache.store(tmp_path / "a.json", Kept((REPORT,)))
    kept = report_cache.recall(tmp_path / "a.json")
    assert (kept.next_bytes, kept.next_assumed) == (None, "") and not caplog.records


def test_a_plan_for_the_budget_itself_is_told_from_none(tmp_path: Path) -> None:
    """0 bytes: the plan that was taken was made for the budget, on what was observed of the first one."""
    assumed = Assumptions(backward_bytes=(("mul", 5),))
    report_cache.store(tmp_path / "a.json", Kept((), 0, assumed.to_text()))
    kept = report_cache.recall(tmp_path / "a.json")
    assert kept.next_bytes == 0 and Assumptions.from_text(kept.next_assumed) == assumed


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/" + "a" * 5000)):
        caplog.clear()
        report_cache.store(folder / "a.json", Kept((REPORT,)))
        assert "cannot be written" in caplog.text
        report_cache.recall(folder / "a.json")
