"""The zoo: its table of architectures, the rows that are stored, and those that miss."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import zoo
from benchmarks.common.code_only import (
    code_of_graphs,
    compile_code,
    plain_peak_bytes,
    plain_peaks_bytes,
    without_compiler,
)
from benchmarks.pages import reports
from benchmarks.zoo import ENTRIES, SAMPLE, child, entry_of, summary
from benchmarks.zoo import __main__ as command
from benchmarks.zoo.building import Entry, WithLoss
from benchmarks.zoo.rows import (
    ADVICE,
    FAILED,
    FLOOR,
    PLAIN,
    SETTINGS,
    STALLED,
    TIMEOUT,
    ZooRow,
    is_kept,
    plain_of,
    store_of,
)
from compile_remat.errors import BudgetError

MIB = 1 << 20
FAMILIES = {
    "encoder", "decoder", "encoder-decoder", "experts", "state space", "convolutional", "vision transformer", "detection",
    "segmentation", "diffusion", "speech", "graph", "recommendation", "gradients inside", "flow", "recurrent",
}  # fmt: skip
ROW = ZooRow(
    "bert", "transformers", "encoder", "min", graphs=1, predicted_bytes=(MIB,), emitted_bytes=(MIB,), rounds=(1,),
    sources="now", torch=torch.__version__,
)  # fmt: skip
PLAIN_ROW = replace(ROW, setting=PLAIN, predicted_bytes=(), emitted_bytes=(4 * MIB,), rounds=())


# -- the table ----------------------------------------------------------------------------------------------------------


def test_there_are_eighty_architectures_of_all_families() -> None:
    assert len(ENTRIES) >= 80
    assert max(Counter(entry.name for entry in ENTRIES).values()) == 1
    assert {entry.family for entry in ENTRIES} >= FAMILIES
    assert {"efficientnet_b0", "x_transformer"} <= {entry.name for entry in ENTRIES}  # models that have missed


def test_entries_are_named_as_a_command_takes_them() -> None:
    for entry in ENTRIES:
        assert entry.name.replace("_", "").isalnum() and entry.name == entry.name.lower(), entry.name
        assert callable(entry.build) and entry.library and entry_of(entry.name) is entry


def test_an_unknown_architecture() -> None:
    with pytest.raises(KeyError, match="no architecture 'nothing' in the zoo; there are: bert"):
        entry_of("nothing")


def test_libraries_are_in_the_extra() -> None:
    text = (Path(zoo.__file__).parents[2] / "pyproject.toml").read_text()
    extra = text.partition("\nzoo = [")[2].partition("]")[0]
    for library in {entry.library for entry in ENTRIES} - {"torch"}:
        assert f'"{library}>=' in extra, library


def test_the_sample_has_sixteen_rows() -> None:
    assert len(set(SAMPLE)) == len(SAMPLE) == 16
    assert {setting for _, setting in SAMPLE} == set(SETTINGS)
    assert len({entry_of(name).family for name, _ in SAMPLE}) >= 10


# -- rows that are stored -----------------------------------------------------------------------------------------------


def test_a_row_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = replace(ROW, budget_bytes=3, warnings=("one",), statuses=("OPTIMAL",))
    store_of(path, {"torch": "2"}).put(row)
    assert store_of(path, {}).rows == [row] and store_of(path, {}).find(row.run) == row
    assert json.loads(path.read_text())["header"] == {"torch": "2"}
    assert store_of(path, {}).find(replace(row, dtype="bfloat16").run) is None


@pytest.mark.parametrize(
    ("row", "fresh", "expected"),
    [
        (None, False, False),
        (ROW, False, True),
        (ROW, True, True),
        (replace(ROW, sources="then"), False, True),
        (replace(ROW, sources="then"), True, False),
        (replace(ROW, sources="then", setting=PLAIN), True, True),
        (replace(ROW, torch="2.11"), False, False),
        (replace(ROW, outcome=STALLED), False, False),
        (replace(ROW, outcome=TIMEOUT), False, True),
    ],
)
def test_rows_that_are_kept(row: ZooRow | None, fresh: bool, expected: bool) -> None:
    assert is_kept(row, sources="now", torch=torch.__version__, fresh=fresh) is expected


def made_by(made: list[ZooRow], failing: frozenset[tuple[str, str]] = frozenset()) -> object:
    """Stands for a process: plain takes 4 MiB, all else 1 MiB, some fail."""

    def in_process(row: ZooRow, timeout_s: float) -> ZooRow:
        made.append(row)
        if (row.model, row.setting) in failing:
            return replace(row, outcome=FAILED, failure="why")
        peak = 4 * MIB if row.setting == PLAIN else MIB
        return replace(row, graphs=1, emitted_bytes=(peak,), predicted_bytes=() if row.setting == PLAIN else (peak,))

    return in_process


def test_a_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[ZooRow] = []
    monkeypatch.setattr(command, "in_process", made_by(made))
    path = tmp_path / "zoo.json"
    arguments = ["--model", "bert", "--model", "t5", "--json", str(path)]
    assert command.main([*arguments, "--setting", "min", "--setting", "0.6"]) == 0
    # all models at the first setting, and plain before a share of it
    order = [("bert", "min"), ("t5", "min"), ("bert", PLAIN), ("bert", "0.6"), ("t5", PLAIN), ("t5", "0.6")]
    assert [(row.model, row.setting) for row in made] == order
    assert made[3].budget_bytes == int(0.6 * 4 * MIB) and made[0].budget_bytes is None
    del made[:]
    assert command.main([*arguments, "--setting", "min", "--setting", "0.4", "--fresh"]) == 0
    assert [(row.model, row.setting) for row in made] == [("bert", "0.4"), ("t5", "0.4")]
    del made[:]
    monkeypatch.setattr("compile_remat.partitioning.partitioner.sources_hash", lambda: "others")
    assert command.main([*arguments, "--setting", "min"]) == 0 and made == []
    assert command.main([*arguments, "--setting", "min", "--fresh"]) == 0
    assert [(row.model, row.setting, row.sources) for row in made] == [
        ("bert", "min", "others"),
        ("t5", "min", "others"),
    ]


def test_time_that_is_up_leaves_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[ZooRow] = []
    monkeypatch.setattr(command, "in_process", made_by(made))
    assert command.main(["--sample", "--minutes", "0"]) == 0
    assert made == [] and "0 rows made or found, 16 left for want of time" in capsys.readouterr().out


def test_where_plain_fails_too_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[ZooRow] = []
    monkeypatch.setattr(command, "in_process", made_by(made, frozenset({("bert", "min"), ("bert", PLAIN)})))
    path = tmp_path / "zoo.json"
    assert command.main(["--model", "bert", "--json", str(path)]) == 1
    assert [(row.model, row.setting) for row in made] == [("bert", "min"), ("bert", PLAIN)]
    assert [row.failure for row in store_of(path, {}).rows] == ["why", "why"]


def test_a_process_that_dies_or_hangs_leaves_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dies, hangs, works = (tmp_path / name for name in ("dies", "hangs", "works"))
    dies.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no room')\n")
    hangs.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    works.write_text(f"#!{sys.executable}\nwhile True:\n    pass\n")
    for script in (dies, hangs, works):
        script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dies))
    row = command.in_process(ROW, 30.0)
    assert (row.outcome, row.failure) == (FAILED, "exit status 1: no room")
    monkeypatch.setattr(sys, "executable", str(works))
    monkeypatch.setattr(command, "PATIENCE", 100)
    row = command.in_process(ROW, 0.25)
    assert (row.outcome, row.failure) == (TIMEOUT, "no end after 0.25 CPU s")
    monkeypatch.setattr(sys, "executable", str(hangs))
    monkeypatch.setattr(command, "PATIENCE", 2)
    row = command.in_process(ROW, 0.25)
    assert (row.outcome, row.failure) == (STALLED, "no end after 0.5 s")


# -- making a row ------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Two blocks with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.full
def test_each_graph_is_seen() -> None:
    inputs = (torch.randn(512, 32),)
    torch.compiler.reset()
    with without_compiler(), code_of_graphs() as graphs:
        compile_code(Halves(), inputs, "max")
    figures = child.figures_of(graphs)
    assert figures["graphs"] == 2 and figures["rounds"] == (1, 1)
    assert len(figures["predicted_bytes"]) == len(figures["emitted_bytes"]) == len(figures["statuses"]) == 2
    torch.compiler.reset()
    with without_compiler():
        plain = plain_peaks_bytes(Halves(), inputs)
    assert len(plain) == 2 and all(plain)
    torch.compiler.reset()
    with without_compiler():
        assert plain_peak_bytes(Halves(), inputs) is None


def test_a_graph_of_varying_sizes_that_is_refused_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """Our backend hands back a region that raises when it is called, and nothing calls it here."""
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())])
    inputs = torch.randn(64, 32)
    torch._dynamo.mark_dynamic(inputs, 0)
    with without_compiler(), pytest.raises(BudgetError, match="lowest reachable peak"):
        compile_code(model, (inputs,), "10KiB")
    assert "failed to eagerly compile backwards" not in caplog.text


def test_a_graph_without_a_backward_does_not_count() -> None:
    torch.compiler.reset()
    module = nn.Linear(32, 32).requires_grad_(False)
    with without_compiler(), code_of_graphs() as graphs:
        compile_code(module, (torch.randn(8, 32),), "min")
    assert len(graphs) == 1 and child.figures_of(graphs)["graphs"] == 0


def small() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    return WithLoss(nn.Sequential(*layers)), (torch.randn(8192, 64),)


def test_a_row_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "entry_of", lambda name: Entry(name, "chain", "torch", small))
    torch.compiler.reset()
    row = child.made(ZooRow("small", "torch", "chain", "min"))
    assert row.outcome == "ok" and row.graphs == 1 and row.rounds == (1,)
    assert row.gradient_bytes == 3 * (64 * 64 + 64) * 4 and row.error is not None
    assert row.cpu_s and row.planning_cpu_s is not None and row.planning_cpu_s <= row.cpu_s
    assert row.step_ns and row.extra_ns is not None
    torch.compiler.reset()
    refused = child.made(ZooRow("small", "torch", "chain", "0.4", budget_bytes=5 * MIB // 4))
    assert refused.outcome == FLOOR and refused.floor_bytes and row.peak_bytes
    assert refused.floor_bytes == pytest.approx(row.peak_bytes, rel=0.05)


def test_the_advice_of_an_error_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "entry_of", lambda name: Entry(name, "chain", "torch", small))
    torch.compiler.reset()
    row = child.made(ZooRow("small", "torch", "chain", ADVICE))
    assert (row.outcome, row.graphs) == ("ok", 1) and row.budget_bytes and row.budget_bytes % MIB == 0
    assert row.peak_bytes and row.budget_bytes - MIB < row.peak_bytes <= row.budget_bytes
    assert not summary.miss(row, [row])
    refused = replace(row, outcome=FLOOR, floor_bytes=row.budget_bytes + 1)
    assert summary.miss(refused, [refused]).startswith("refused at")


def test_a_budget_that_is_kept_below_min_misses() -> None:
    rows = [
        ROW,
        kept := replace(ROW, setting="0.4", budget_bytes=MIB, emitted_bytes=(MIB // 2,), predicted_bytes=(MIB // 2,)),
    ]
    assert summary.miss(kept, rows) == "min takes 1.0" and not summary.miss(
        replace(kept, emitted_bytes=(MIB,), predicted_bytes=(MIB,)), [ROW]
    )


def test_a_model_that_cannot_be_built_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        raise ImportError("no such library")

    monkeypatch.setattr(child, "entry_of", lambda name: Entry(name, "chain", "torch", build))
    row = child.made(ROW)
    assert (row.outcome, row.failure) == (FAILED, "ImportError: no such library")


@pytest.mark.full
def test_a_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "entry_of", lambda name: Entry(name, "chain", "torch", small))
    torch.compiler.reset()
    row = child.made(ZooRow("small", "torch", "chain", "min", is_real=True))
    assert row.failure == "" and row.reference == "eager"
    assert row.gradient_error is not None and row.gradient_error < 1e-4
    assert row.measured_bytes == pytest.approx(row.peak_bytes, rel=0.01)


@pytest.mark.full
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra zoo")
def test_a_model_of_a_library(tmp_path: Path) -> None:
    path = tmp_path / "zoo.json"
    command.main(["--model", "distilbert", "--setting", "min", "--json", str(path)])
    (row,) = store_of(path, {}).rows
    assert row.failure == "" and row.graphs == 1 and row.error is not None


# -- misses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"emitted_bytes": (int(1.004 * MIB),)}, ""),
        ({"emitted_bytes": (int(1.006 * MIB),)}, "prediction"),
        ({"emitted_bytes": (None,)}, "a peak is not known"),
        ({"graphs": 0, "predicted_bytes": (), "emitted_bytes": ()}, "no graph has a backward"),
        ({"budget_bytes": MIB - 1}, "over the budget"),
        ({"budget_bytes": MIB}, ""),
        ({"outcome": TIMEOUT, "failure": "no end"}, "timeout: no end"),
        ({"measured_bytes": 2 * MIB}, "measured 2.0"),
        ({"gradient_error": 0.1, "reference": "eager"}, "gradients 1.0e-01 from eager"),
        ({"gradient_error": 0.1, "reference": "eager", "dtype": "bfloat16"}, ""),
    ],
)
def test_misses(changes: dict[str, object], expected: str) -> None:
    assert summary.miss(replace(ROW, **changes), [ROW]) == expected


@pytest.mark.parametrize(
    ("budget_bytes", "floor_bytes", "expected"),
    [
        (MIB // 2, MIB, ""),
        (MIB // 2, 2 * MIB, "floor 2.0, min reaches 1.0"),
        (3 * MIB // 2, 2 * MIB, "refused, although min reaches 1.0; floor 2.0, min reaches 1.0"),
    ],
)
def test_floors_are_compared_with_min(budget_bytes: int, floor_bytes: int, expected: str) -> None:
    row = replace(ROW, setting="0.4", outcome=FLOOR, budget_bytes=budget_bytes, floor_bytes=floor_bytes)
    assert summary.miss(row, [ROW]) == expected
    assert summary.miss(row, []) == ""


def test_an_error_names_the_floor_of_one_of_several_graphs() -> None:
    lowest = replace(ROW, setting="min", graphs=2, emitted_bytes=(2 * MIB, 3 * MIB))
    row = replace(ROW, setting="0.4", outcome="floor", budget_bytes=MIB, emitted_bytes=(), predicted_bytes=())
    assert summary.miss(replace(row, floor_bytes=2 * MIB), [lowest]) == ""
    assert summary.miss(replace(row, floor_bytes=4 * MIB), [lowest]) == "floor 4.0, min reaches 3.0"


def test_the_graph_with_the_largest_error_counts() -> None:
    row = replace(ROW, graphs=2, predicted_bytes=(MIB, MIB), emitted_bytes=(MIB, 2 * MIB))
    assert row.errors == [0.0, -0.5] and row.error == -0.5 and row.peak_bytes == 2 * MIB


# -- summaries ----------------------------------------------------------------------------------------------------------


def rows() -> list[ZooRow]:
    low = replace(ROW, model="t5", emitted_bytes=(2 * MIB,), rounds=(2,))
    refused = replace(ROW, setting="0.4", outcome=FLOOR, budget_bytes=1, floor_bytes=MIB, rounds=(), emitted_bytes=())
    return [PLAIN_ROW, ROW, low, refused]


def test_a_file_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zoo.json"
    path.write_text(json.dumps({"header": {"torch": "2"}, "rows": [asdict(row) for row in rows()]}))
    assert summary.show(path) == 1
    said = capsys.readouterr().out
    assert "2 models, 3 rows: 1 floor, 2 ok" in said
    assert "all: median 25.00%, 95th 50.00%, worst -50.0%, 1 of 2 rows above 0.5%" in said
    assert "rounds: 1 in 1, 2 in 1" in said and "min over plain: median 0.25" in said
    assert "rows that miss: 1" in said and said.splitlines()[-1].split() == [
        "t5", "min", "1", "-", "1.0", "2.0", "-50.00%", "-", "2", "-", "prediction",
    ]  # fmt: skip


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    new = [replace(row, emitted_bytes=(3 * MIB,)) if row.model == "t5" else row for row in rows()]
    for path, each in ((before, rows()), (after, new)):
        path.write_text(json.dumps({"header": {}, "rows": [asdict(row) for row in each]}))
    assert summary.compare(before, before) == 0
    assert summary.compare(before, after) == 0  # it missed before
    said = capsys.readouterr().out
    assert "floors, after over before: median 1.0000, worst 1.5000 (t5 at min), least 1.0000, 3 rows" in said
    assert summary.compare(after, before) == 0
    worse = [replace(row, emitted_bytes=(3 * MIB,)) if row.setting == "min" else row for row in rows()]
    after.write_text(json.dumps({"header": {}, "rows": [asdict(row) for row in worse]}))
    assert summary.compare(before, after) == 1
    assert "rows that miss now and did not before" in capsys.readouterr().out


def test_plain_is_of_the_same_dtype() -> None:
    assert plain_of(ROW, rows()) == PLAIN_ROW
    assert plain_of(replace(ROW, dtype="bfloat16"), rows()) is None


def test_the_page_has_the_zoo() -> None:
    zoo = reports.ZOO
    titles, cells = zoo.table(rows())
    assert titles[0] == "model" and [row[0] for row in cells] == ["bert", "t5"]
    assert "rows that miss: 1" in str(zoo.summary(rows()))
    assert list(zoo.misses(rows())) == [("t5", "min", "prediction")]


def test_each_dtype_has_a_line_of_its_own() -> None:
    low = replace(ROW, dtype="bfloat16", predicted_bytes=(MIB // 2,), emitted_bytes=(MIB // 2,))
    _, lines = summary.model_table([ROW, low])
    assert [(line[0], line[-2]) for line in lines] == [("bert", "1.0 > 1.0"), ("bert, bfloat16", "0.5 > 0.5")]
