"""Options of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _compiled_elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What other tests gave to the backend and never ran does not make a graph expect company (mark `company`: it does)."""
    if request.node.get_closest_marker("company") is None:
        from compile_remat._torch import step_peers

        monkeypatch.setattr(step_peers, "_others_waiting", lambda wrapper: False)
    yield


@pytest.fixture
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing compiled, cached or reported elsewhere; torch's caches lie in a folder of the test's own."""
    import torch

    import compile_remat

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    compile_remat.reset_reports()
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases marked `full` are for `make test-full`."""
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="runs with --full: `make test-full`"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full product of cases, compilers and budgets (slow)")
