"""The list of reports prints as a table, one row a graph, wherever it is shown."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import compile_remat
from compile_remat.report_table import EMPTY, UNMEASURED, Reports
from tests.sources import ROOT
from tests.test_report import MIB, REPORT

OTHER = replace(REPORT, graph_key="fedcba9876543210", module="Head", budget="min", budget_bytes=None, region=2)
MEASURED = replace(REPORT, region=1, observed_peak_bytes=7 * MIB + 4096, measured_peak_bytes=7 * MIB)


def test_one_row_a_graph() -> None:
    replaced = replace(MEASURED, module="GPT, at first", runs_now=False)
    assert_expected_inline(
        str(Reports([replaced, MEASURED, OTHER, replace(OTHER, plan=None, module="", budget="0.5", region=3)])),
        """\
module      budget  planned  observed  measured     extra time  status    graph
---------  -------  -------  --------  --------  -------------  --------  --------
GPT        8.0 MiB  7.0 MiB   7.0 MiB   7.0 MiB  +4.0%, 400 us  FEASIBLE  01234567
Head           min  7.0 MiB         -         -  +4.0%, 400 us  FEASIBLE  fedcba98
(unknown)      0.5        -         -         -              -  FALLBACK  fedcba98
and 1 plan that others replaced""",
    )


def test_a_graph_whose_plans_were_all_replaced_keeps_its_last_row() -> None:
    gone = [replace(MEASURED, module=name, runs_now=False) for name in ("first", "last")]
    assert [(row[0], row[-2]) for row in Reports(gone).rows()] == [("last", "FEASIBLE, replaced")]


@pytest.mark.parametrize(
    ("budget", "budget_bytes", "shown"),
    [
        ("0.5", 9 * MIB, "0.5 (9.0 MiB)"),
        ("auto", 9 * MIB, "auto (9.0 MiB)"),
        ("9MiB", 9 * MIB, "9.0 MiB"),
        ("1.5MiB", 3 * MIB // 2, "1.5 MiB"),
        ("900KB", 900_000, "878.9 KiB"),
        ("max", None, "max"),
    ],
)
def test_a_budget_has_the_unit_of_its_peak(budget: str, budget_bytes: int | None, shown: str) -> None:
    (row,) = Reports([replace(REPORT, budget=budget, budget_bytes=budget_bytes)]).rows()
    assert row[1] == shown
    assert len({cell.split()[-1].strip(")") for cell in row[1:5] if "iB" in cell}) == 1


def test_it_is_a_list_and_looks_the_same_everywhere() -> None:
    table = Reports([MEASURED])
    assert table == [MEASURED] and table[0] is MEASURED and repr(table) == str(table)
    assert UNMEASURED not in str(table) and UNMEASURED in str(Reports([REPORT]))
    page = Reports([replace(REPORT, module="<lambda>")])._repr_html_()
    assert page.startswith("<table><tr><th>module</th>") and "<td>&lt;lambda&gt;</td>" in page
    assert str(Reports()) == repr(Reports()) == EMPTY and Reports()._repr_html_() == f"<p>{EMPTY}</p>"
    assert "rich" not in sys.modules or table.__rich__()


def test_rich_draws_it() -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(Reports([MEASURED]))
    assert "GPT" in (text := console.export_text()) and "+4.0%, 400 us" in text


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).sin()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.b(x).sin()


class Loop:
    def __init__(self) -> None:
        self.one, self.other = Net(), Net()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x))


NET = Net()


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return NET(x).sum()


class Me(nn.Module):
    """Has a container, and another name for `self`."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*parts)

    def forward(me, x: torch.Tensor) -> torch.Tensor:
        return me.body(x).sin()  # type: ignore[no-any-return]


def _wrapped() -> nn.Module:
    """Returns a module whose forward is in a function, as Accelerate leaves it."""
    module = Me(nn.Linear(8, 8))
    given = module.forward
    module.forward = lambda *inputs, **named: given(*inputs, **named)  # type: ignore[method-assign]
    return module


def _breaking() -> nn.Module:
    net = Net()
    net.breaks = True
    return net


@pytest.mark.parametrize(
    ("compiled", "names"),
    [
        (type("Wider", (Net,), {})(), ["Wider"]),
        (nn.Sequential(Net(), nn.ReLU()), ["Sequential"]),
        (loss_of, ["Net"]),
        (Loop().step, ["Loop.step"]),
        (lambda x: (x @ x.T).sin(), ["<lambda>"]),
        (_breaking(), ["Net", "Net"]),
        (Me(nn.Linear(8, 8)), ["Me"]),
        (_wrapped(), ["Me"]),
        (nn.DataParallel(Net(), device_ids=[]), ["Net"]),
        (Me(nn.Linear(8, 8)).forward, ["Me"]),
    ],
    ids=[
        "a module",
        "a container",
        "a function of a module",
        "of two",
        "of none",
        "with a break",
        "a container inside",
        "a wrapped forward",
        "a wrapper of torch's",
        "a method",
    ],
)
def test_a_graph_bears_the_name_of_its_module(fresh: None, compiled: object, names: list[str]) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    step = torch.compile(compiled, backend="remat", options={"memory_budget": "1GiB", "compiler": "eager"})  # type: ignore[call-overload]
    step(x).sum().backward()
    assert [report.module for report in compile_remat.reports()] == names
    assert compile_remat.explain(compiled, x, compiler="eager").module == names[0]  # type: ignore[arg-type]


@pytest.mark.full
def test_the_example_of_the_readme_shows_a_row(
    fresh: None, own_caches: object, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "README.md").read_text().partition("## Look before you train")[2]
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    exec(text.partition("```python\n")[2].partition("\n```")[0], {"model": model, "torch": torch})
    *_, row, note = capsys.readouterr().out.strip().splitlines()
    assert row.startswith("Sequential  60.0 MiB") and note == UNMEASURED
