"""Every case meets every compiler; `--full` adds budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import compile_remat
from tests.correctness.harness import BUDGETS, FULL_BUDGETS, Case


@pytest.fixture
def budgets(request: pytest.FixtureRequest, compiler: str) -> Sequence[float | str]:
    return (FULL_BUDGETS if request.config.getoption("--full") else BUDGETS)[compiler]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in compile_remat.RematConfig.__dataclass_fields__:
        monkeypatch.delenv(f"REMAT_{name.upper()}", raising=False)
    torch.compiler.reset()
    compile_remat.reset_reports()
    yield
    torch.compiler.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` and `compiler` runs once for each pair of its module's `CASES`."""
    if {"case", "compiler"} <= set(metafunc.fixturenames):
        cases: Sequence[Case] = metafunc.module.CASES
        pairs = [(case, compiler) for case in cases for compiler in case.compilers]
        metafunc.parametrize(("case", "compiler"), pairs, ids=[f"{case}-{compiler}" for case, compiler in pairs])
