"""Every case meets every compiler; `--full` adds budgets, and Inductor beside `WITH_KERNELS`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet

from tests.correctness.harness import BUDGETS, FULL_BUDGETS, MORE_BUDGETS, Case

WITH_KERNELS = {
    "every kind of dropout": "forward and backward draw the same numbers in other kernels",
    "drawn by the backward": "so does a graph whose backward draws",
    "fallback_random": "and one that draws as eager mode does",
    "mutation": "kernels overwrite inputs and buffers, and outputs share memory",
    "bfloat16": "kernels keep sums in float32 and round what they store",
    "graph_breaks": "several graphs are compiled in a step",
    "sizes_as_numbers": "kernels of any size",
    "must, turned round": "tags decide what the backward computes again",
    "nested_regions": "a graph inside of a graph is lowered",
    "a bias, by data": "a copy of an input could be taken for an operation without effect",
    "flex_inference": "an operator that only Inductor lowers",
}
"""Cases that `make test` runs through Inductor where they are short (`tests/durations.txt`), and what eager mode
cannot show of each. The planner and the graphs are the same for both compilers, so that all other cases need no C++ compiler."""


PROOFS = (
    "bfloat16-inductor",
    "mutation-inductor",
    "every kind of dropout-eager",
    "checkpoint-eager",
    "graph_breaks-eager",
)
"""Cases that `make test` runs whatever they take."""


@pytest.fixture
def budgets(request: pytest.FixtureRequest, is_full: bool, compiler: str) -> Sequence[float | str]:
    if is_full:
        return FULL_BUDGETS
    case = request.node.callspec.params.get("case")
    stands_for_a_kind = case is None or case.name in WITH_KERNELS
    return MORE_BUDGETS if compiler == "eager" and stands_for_a_kind else BUDGETS


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> None:
    """All cases start without settings and state."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` and `compiler` runs once for each pair of its module's `CASES`."""
    if {"case", "compiler"} <= set(metafunc.fixturenames):
        cases: Sequence[Case] = metafunc.module.CASES
        metafunc.parametrize(("case", "compiler"), [_pair(case, c) for case in cases for c in case.compilers])


def _pair(case: Case, compiler: str) -> ParameterSet:
    name, marks = f"{case}-{compiler}", []
    if case.is_full or (compiler == "inductor" and case.name not in WITH_KERNELS):
        marks.append(pytest.mark.full)
    if name in PROOFS:
        marks.append(pytest.mark.proof)
    return pytest.param(case, compiler, id=name, marks=marks)
