"""A program under a budget, compiled by Inductor: its numbers, the peaks of its steps, and the same out of torch's caches."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import compile_remat
from compile_remat._util.units import exact_size
from compile_remat.backend import remat
from compile_remat.budget import MemoryBudget
from compile_remat.errors import BudgetError, PlannerWarning, RematError, find_error
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.runtime.process_state import clear_process_state
from tests import compile_caches
from tests.correctness.harness import Observed
from tests.fuzz.agreement import assert_promise_holds
from tests.fuzz.steps import Trained, train
from tests.fuzz.trial import BYTES, Trial

LEAST_BYTES = 64 << 10
"""Peaks below this say little: a copy of the random state is a large part of them."""

RANDOM_STATE_BYTES = 24 << 10
"""The most that torch itself holds: while it compiles, four copies of the random state of 5,056 bytes."""

NOT_SLICED = (
    "cannot be sliced",
    "rows of dynamic sizes are not computed in slices",
    "rows are not computed in slices: the graph shares its budget",
)
"""Warnings if rows were to be in slices and are not: the plan is that of the whole graph."""

KEPT = ("as Inductor's code for the budget needed more", "set aside: PREFER_RECOMPUTE")
"""Warnings if a budget is kept by a plan for fewer bytes, or by a plan that saves values that a checkpoint would recompute."""

Compare = Callable[[Observed, str], None]
"""Raises an AssertionError, which begins with the text, where the numbers are not the expected ones."""

FOLDER = "TORCHINDUCTOR_CACHE_DIR"

AT_THE_END = "gradients = early: some leave the backward at its end"
"""The warning if autograd does more than accumulate into a leaf: the plan's peak may not hold then."""

MISSED = (" allows ", "Inductor's code needs ")
"""Warnings under a fraction that no plan keeps."""


@dataclass(frozen=True)
class Outcome:
    """Promised and measured peaks, in bytes.

    Attributes:
        budget: `kept`, `missed` (a fraction below the lowest peak, which a warning says), `refused` (bytes below what the emitted
            code needs, which an error says), `late` (gradients left at the end of the backward, which a warning says) or `none`.
        predicted_bytes: The plan's peak, where a single graph was compiled and its step measured.
        emitted_bytes: The peak of the emitted code, by a dry run.
        first_bytes, later_bytes: The measured peaks of the first step and the second.
    """

    budget: str
    predicted_bytes: int | None = None
    emitted_bytes: int | None = None
    first_bytes: int | None = None
    later_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """Prediction over the later step's peak, minus 1; None if a peak is missing or below `LEAST_BYTES`."""
        if not self.predicted_bytes or not self.later_bytes or self.later_bytes < LEAST_BYTES:
            return None
        return self.predicted_bytes / self.later_bytes - 1


def check_compiled(trial: Trial, budget: float | str, compare: Compare) -> Outcome:
    """Train in empty caches, then out of the caches that this filled, as a second process would; there the steps are measured.

    A step that compiles takes a second more to measure, and the code is the same.

    Raises:
        AssertionError: Numbers differ, a step needs more than its budget, or than the dry run of its code said.
    """
    with own_graph_caches():
        setting = _bytes_between(trial) if budget == BYTES else budget
        for caches in ("empty", "full"):
            where = f"memory_budget {budget}, {caches} caches"
            try:
                outcome, seen = _run(trial, setting, where, is_measured=caches == "full" and _frees_gradients(trial))
            except Exception as error:
                if find_error(error, BudgetError) is None:
                    raise
                return Outcome("refused")
            compare(seen, where)
    return outcome


def _run(trial: Trial, setting: float | str, where: str, *, is_measured: bool) -> tuple[Outcome, Observed]:
    torch.compiler.reset()
    clear_process_state()
    torch.manual_seed(0)
    options = {
        "memory_budget": setting,
        "oom_retry": 0,
        **trial.options,
    }  # a second try keeps copies of what the step overwrites
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", PlannerWarning)
        trained = train(
            trial,
            lambda function: torch.compile(function, backend=remat, options=options),  # type: ignore[arg-type]
            is_measured=is_measured,
        )
    texts = [text for text in (str(w.message) for w in said) if _is_of_interest(text)]
    late = [text for text in texts if AT_THE_END in text]
    unknown = [text for text in texts if not any(part in text for part in (*MISSED, AT_THE_END))]
    assert not unknown, f"{where}: {unknown[0]}"
    assert compile_remat.reports(), f"{where}: no graph was planned"
    assert_promise_holds(setting)
    limit_bytes = _limit_bytes(setting)
    budget = "none" if limit_bytes is None else "missed" if texts else "kept"
    if late:
        return Outcome("late"), {**trained.seen, "random state": torch.get_rng_state()}
    outcome, spare_bytes = _outcome(budget, trained), RANDOM_STATE_BYTES + trained.copied_bytes
    if budget == "kept":
        for step, peak in enumerate(trained.peak_bytes):
            assert peak <= limit_bytes + spare_bytes, f"{where}: step {step} took {peak} of {limit_bytes} bytes"
    if outcome.emitted_bytes is not None and outcome.later_bytes is not None:
        excess = outcome.later_bytes - outcome.emitted_bytes
        assert excess <= spare_bytes, f"{where}: {excess} bytes more than the dry run said: {outcome}"
    seen = {**trained.seen, "random state": torch.get_rng_state()}
    torch.compiler.reset()
    return outcome, seen


def _is_of_interest(text: str) -> bool:
    """False if a warning has only texts of `KEPT` or `NOT_SLICED`; from the cache, all messages of a graph are one warning."""
    return any(part in text for part in MISSED) or not any(part in text for part in (*KEPT, *NOT_SLICED))


def _frees_gradients(trial: Trial) -> bool:
    """True if the plan's peak applies to a step: it has one backward, and hooks free early gradients if there are any."""
    return trial.losses == 1 and (trial.gradients == "end" or trial.steps_in_hooks)


def _outcome(budget: str, trained: Trained) -> Outcome:
    report, *others = compile_remat.reports()
    if others or not trained.peak_bytes:  # no dry run has the tensors of an unplanned graph
        return Outcome(budget)
    return Outcome(budget, report.predicted_peak_bytes, report.scheduled_peak_bytes, *trained.peak_bytes)


def _limit_bytes(setting: float | str) -> int | None:
    """Bytes that a step may take; None under `min` and `max`."""
    budget = MemoryBudget.parse(setting)
    share = {"bytes": 1, "fraction": largest_plain_bytes("cpu")}.get(budget.kind)
    return None if share is None or budget.value is None else int(budget.value * share)


def _bytes_between(trial: Trial) -> str | float:
    """Half way between the lowest peak and the fastest plan's; a fraction where a step has several graphs."""
    module, inputs = trial.program.module()
    if "graph_break" in trial.program.kinds:
        return 0.5
    try:
        plans = compile_remat.pareto(module, *inputs, points=2)
    except RematError:
        return 0.5
    return exact_size((plans[0].peak_bytes + plans[-1].peak_bytes) // 2)


@contextlib.contextmanager
def own_graph_caches() -> Iterator[None]:
    """Torch's caches of graphs, empty, and the kernels of all other trials."""
    shared = cache_dir()
    folder = _linked_folder(shared)
    for entry in folder.iterdir():
        if not entry.is_symlink():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        os.environ[FOLDER] = shared


@functools.cache
def _linked_folder(store: str) -> Path:
    """A folder of this process, for as long as it lives, with links to the kernels."""
    folder = Path(tempfile.mkdtemp(prefix="remat_fuzz_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return compile_caches.linked(folder, compile_caches.open_store(Path(store)))
