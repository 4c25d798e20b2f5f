"""Options of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _compiled_elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests gave to the backend and never ran does not make a graph expect company (mark `company`: it does)."""
    if request.node.get_closest_marker("company") is None:
        from compile_remat import _torch_dynamo

        monkeypatch.setattr(_torch_dynamo, "_others_waiting", lambda wrapper: False)
    yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full product of cases, compilers and budgets (slow)")
