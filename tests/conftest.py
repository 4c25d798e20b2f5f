"""Options of the whole suite, and where it compiles."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

from tests import compile_caches, selection
from tests.durations import Durations
from tests.ranks.processes import Ranks, ranks_of


@pytest.fixture(autouse=True)
def _no_plain_peaks_of_other_tests() -> Iterator[None]:
    """Forget plain peaks after each test: the base of fractional budgets only grows while a process lives."""
    yield
    plain_peaks = sys.modules.get("compile_remat.planning.plain_peaks")
    if plain_peaks is not None:
        plain_peaks.forget_plain_peaks()


@pytest.fixture(autouse=True)
def _busy_machines_are_not_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line in the log for a graph that takes long to plan: tests of logs would depend on what else the machine does."""
    announcement = sys.modules.get("compile_remat.announcement")
    if announcement is not None:
        monkeypatch.setattr(announcement, "SILENT_S", 3600.0)


@pytest.fixture(autouse=True)
def _warnings_as_in_a_new_process() -> None:
    """Each warning comes once in a process, and so once in a test."""
    user_warnings = sys.modules.get("compile_remat._util.user_warnings")
    if user_warnings is not None:
        user_warnings.forget_warnings()


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    """True under --full, for tests that do more then."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings of the caller's, and no graph, report or state of earlier tests; random numbers start at one place."""
    import torch

    from compile_remat.config import RematConfig
    from compile_remat.runtime.process_state import clear_process_state

    for name in ("RANK", *(f"REMAT_{name.upper()}" for name in RematConfig.__dataclass_fields__)):
        monkeypatch.delenv(name, raising=False)
    torch.compiler.reset()
    clear_process_state()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def uncached(fresh: None) -> Iterator[None]:
    """`fresh`, and everything is compiled anew: on a hit of torch's caches nothing of ours would run."""
    import torch

    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing compiled, cached or reported elsewhere but kernels; the folder of torch's caches."""
    import torch

    from compile_remat.runtime.process_state import clear_process_state

    folder = compile_caches.linked(tmp_path, Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    torch.compiler.reset()
    clear_process_state()
    yield folder
    torch.compiler.reset()


@pytest.fixture
def empty_kernels(own_caches: Path) -> Iterator[None]:
    """For peaks, not numbers: Inductor generates all code, which allocates and calls the library, but no C++ is compiled.

    The kernels are called and do nothing. A folder of its own keeps that code from tests that run it.
    """
    from benchmarks.common.code_only import kernels_replaced_by

    def do_nothing(*args: object) -> None:
        pass

    with kernels_replaced_by(do_nothing):
        yield


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two processes of a gloo group."""
    with ranks_of(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    """Four of them."""
    with ranks_of(4) as ranks:
        yield ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Count CPU time, draw few examples, and compile into a folder of this run; kernels of earlier runs are in `.pytest_cache`."""
    max_examples = 100 if config.getoption("--full") else 25
    hypothesis.settings.register_profile("remat", max_examples=max_examples, deadline=None)
    hypothesis.settings.load_profile("remat")
    config.pluginmanager.register(selection.CpuTimes(config, Durations.read()))
    if hasattr(config, "workerinput"):
        return  # a worker of pytest-xdist has the folder from the process that started it
    run = tempfile.TemporaryDirectory(prefix="remat-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(run.cleanup)
    kept = (
        config.cache.mkdir(f"inductor-{version('torch')}") if hasattr(config, "cache") else Path(run.name) / "kernels"
    )
    store = compile_caches.open_store(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", kept)))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_caches.linked(Path(run.name) / "torch", store))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --full, what takes long is skipped; the longest tests start first."""
    known = Durations.read()
    selection.select(config, items, known)
    selection.longest_first(items, known)
