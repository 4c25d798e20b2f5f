"""Modes, options and torch's caches: a second process hits them, with the same plan and its report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

import compile_remat
import compile_remat.cost_models
import compile_remat.passes
from compile_remat.backend import remat
from compile_remat.compilation import report_cache
from compile_remat.compilation.readings import PlanRefused
from compile_remat.compilation.region_run import RegionRun
from compile_remat.compilation.rounds import Rounds
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.planning.request import FitBelow
from compile_remat.report import Report
from compile_remat.runtime.process_state import clear_process_state
from tests.compile_caches import linked
from tests.processes import run


def device_file(folder: Path, bandwidth_bytes_per_s: int) -> None:
    """Measured figures, as `calibrate` would write them; the device has the same name wherever the file lies."""
    figures = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "flops_per_s": {"float32": 10**12}}
    folder.mkdir(parents=True)
    (folder / "here.json").write_text(json.dumps(figures))


def job(
    model: str = "chain", batch: int = 64, options: Mapping[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """A job of `tests.jobs.training`; `$` stands for the folder of the test."""
    given = {} if "mode" in others else {"options": {"memory_budget": "min", **(options or {})}}
    return {"model": model, "batch": batch, "compile": {**given, **others}}


JOBS = {"min": job(), "a graph break": job("broken")}
"""No two jobs may share an entry of torch's cache."""

FULL_JOBS = {
    "another budget": job(options={"memory_budget": 0.9}),
    "a device file": job(options={"device": "$/a/here.json"}),
    "the file's figures changed": job(options={"device": "$/b/here.json"}),
    "another limit of work": job(options={"time_limit": 30}),
    "another device": job(options={"device": "h200"}),
    "another cost model": job(options={"cost_model": "unit"}),
    "options of Inductor": job(options={"epilogue_fusion": False, "max_fusion_size": 8}, fullgraph=True),
    "reduce-overhead": job(mode="reduce-overhead", fullgraph=True),
    "max-autotune": job(mode="max-autotune"),
    "max-autotune without graphs": job(options={"mode": "max-autotune-no-cudagraphs"}),
    "regions compiled once": job("regions"),
    "any batch": job(dynamic=True),
    "any batch, a large one first": job(batch=128, dynamic=True),
}
"""Further ones, for `make test-full`."""

NAMES = [
    *(pytest.param(name, marks=pytest.mark.proof) for name in JOBS),
    *(pytest.param(name, marks=pytest.mark.full) for name in FULL_JOBS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("caches")
    linked(made / "cache", Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    return made


@pytest.fixture(scope="module")
def processes(folder: Path, is_full: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """The results of each job in the first process and in the second."""
    device_file(folder / "a", 10**11)
    device_file(folder / "b", 10**10)
    named = {**JOBS, **(FULL_JOBS if is_full else {})}
    jobs = json.loads(json.dumps(list(named.values())).replace("$", str(folder)))
    both = {
        name: run(jobs, {**environ(folder), "PYTHONHASHSEED": seed}) for name, seed in (("first", "1"), ("second", "2"))
    }
    return {name: dict(zip(named, found, strict=True)) for name, found in both.items()}


def environ(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "REMAT_MEMORY_BUDGET": "min"}


@pytest.mark.parametrize("name", NAMES)
def test_no_setting_is_served_from_the_cache_of_another(name: str, processes: dict[str, Any]) -> None:
    found = processes["first"][name]
    assert (found["partition_hits"], found["graph_hits"]) == (0, 0)
    assert found["partition_misses"] > 0 and found["graph_misses"] > 0
    assert not any(report["from_cache"] for report in found["reports"])
    assert len(found["reports"]) == 1 or name in SEVERAL
    assert found["warnings"] == []


SEVERAL = ("a graph break", "regions compiled once")
"""Jobs for which the planner runs more than once: for two graphs, or for a region (on torch 2.11 for each call of it) and
the graph around it."""


@pytest.mark.parametrize("name", NAMES)
def test_a_second_process_hits_both_caches_and_has_its_report(name: str, processes: dict[str, Any]) -> None:
    first, second = processes["first"][name], processes["second"][name]
    assert second["partition_hits"] > 0 and second["graph_hits"] == first["graph_misses"]
    assert second["graph_misses"] == 0
    assert second["reports"] == [{**report, "from_cache": True} for report in first["reports"]]


@pytest.mark.full
def test_modes_and_regions_are_planned_like_anything_else(processes: dict[str, Any]) -> None:
    found = processes["first"]
    plans = {name: found[name]["reports"][-1]["plan"] for name in found}
    for name in found:
        assert name == "another budget" or any(report["plan"]["recomputed"] for report in found[name]["reports"])
    assert all(len(found[name]["reports"]) > 1 for name in SEVERAL)
    assert plans["reduce-overhead"]["saved"] == plans["min"]["saved"]
    assert plans["another budget"]["peak_bytes"] > plans["min"]["peak_bytes"]
    assert plans["any batch, a large one first"]["peak_bytes"] > 1.5 * plans["any batch"]["peak_bytes"]


@pytest.mark.full
def test_another_version_of_our_sources_misses(folder: Path, processes: dict[str, Any], tmp_path: Path) -> None:
    changed = tmp_path / "compile_remat"
    for package, place in (
        (compile_remat, changed),
        (compile_remat.passes, changed / "passes"),
        (compile_remat.cost_models, changed / "cost_models"),
    ):
        source = Path(package.__file__ or "").parent
        shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    with (changed / "passes" / "search" / "solver.py").open("a") as file:
        file.write("# another version\n")
    (found,) = run([JOBS["min"]], environ(folder), sources=tmp_path)
    assert (found["partition_hits"], found["partition_misses"]) == (0, 1)
    (report,) = found["reports"]
    assert not report["from_cache"]
    assert report["plan"] == processes["first"]["min"]["reports"][0]["plan"]


@pytest.mark.full
def test_a_lost_or_damaged_side_file_costs_the_report_only(folder: Path, processes: dict[str, Any]) -> None:
    copy = folder / "damaged"
    shutil.copytree(folder / "cache", copy, symlinks=True)
    for path in (copy / "remat").iterdir():
        path.write_text("{")
    (found,) = run([JOBS["min"]], {**environ(folder), "TORCHINDUCTOR_CACHE_DIR": str(copy)})
    assert (found["partition_hits"], found["reports"]) == (1, [])


@pytest.mark.usefixtures("empty_kernels")
def test_a_graph_that_was_rewritten_in_a_refused_round_has_that_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round gets the graph as the first round left it; another process gets the graph as it came."""
    judged, names = list[RematPartitioner](), list[set[str]]()

    def refuse_first(rounds: Rounds, reports: Sequence[Report], run: RegionRun) -> None:
        judged.append(rounds.partitioner)
        if len(judged) == 1:
            rounds.partitioner = replace(rounds.partitioner, request=FitBelow(1 << 20))
            raise PlanRefused

    monkeypatch.setattr(Rounds, "judge", refuse_first)
    store = report_cache.store
    monkeypatch.setattr(report_cache, "store", lambda path, kept: (names[-1].add(path.name), store(path, kept)))
    weight = torch.randn(8, requires_grad=True)
    for number in range(3):
        names.append(set())
        torch.compiler.reset()
        clear_process_state()
        call = torch.compile(
            lambda x: torch.tanh(torch.cat((x * weight, x * weight, x), -1)),
            backend=remat,
            options={"memory_budget": "1MiB"},
        )
        call(torch.randn(4, 8)).sum().backward()
        (report,) = compile_remat.reports()
        assert len(judged) == 2, "the plan of the second round is taken without another one"
        assert report.from_cache == (number == 2)
    first, second, third = names
    assert second and second < first and not third


@pytest.mark.usefixtures("empty_kernels")
def test_a_refused_plan_leaves_no_folder_where_caches_are_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Without caches, torch compiles in a temporary folder, and keeps this folder; after an error, with a warning."""
    judged = list[RematPartitioner]()

    def refuse_first(rounds: Rounds, reports: Sequence[Report], run: RegionRun) -> None:
        judged.append(rounds.partitioner)
        if len(judged) == 1:
            raise PlanRefused

    monkeypatch.setattr(Rounds, "judge", refuse_first)
    weight = torch.randn(8, requires_grad=True)
    with inductor_config.patch(force_disable_caches=True):
        call = torch.compile(lambda x: torch.tanh(x * weight), backend=remat, options={"memory_budget": "1MiB"})
        call(torch.randn(4, 8)).sum().backward()
    assert len(judged) == 2
    assert not [record for record in caplog.records if "cache dir" in record.getMessage()]
    assert len(list(tmp_path.glob("tmp*"))) == 1  # torch's, of the plan that runs
