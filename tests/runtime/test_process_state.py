"""All state that the process remembers is listed, and can be cleared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import compile_remat
from compile_remat import config, report
from compile_remat.budget import MemoryBudget
from compile_remat.planning import budget_source, plain_peaks
from compile_remat.report import Report
from compile_remat.runtime import process_state
from compile_remat.runtime.process_state import clear_process_state
from compile_remat.runtime.shared_budget import budget_of

STATE = re.compile(r"^(_\w+)(?:: [^=]+)? = (?:ContextVar\(|WeakKeyDictionary|\{\}$|\[\]$)", re.MULTILINE)


def test_every_module_that_keeps_state_is_listed() -> None:
    folder = Path(compile_remat.__file__).parent
    found = {name for file in folder.rglob("*.py") for name in STATE.findall(file.read_text())}
    assert {"_REPORTS", "_BUDGETS", "_LARGEST", "_STEP", "_RECORDED", "_FOLDER"} <= found
    assert [name for name in sorted(found) if f".{name}" not in (process_state.__doc__ or "")] == []


def test_what_earlier_compilations_left_is_forgotten() -> None:
    before = budget_of(torch.device("cpu"), "1GiB", MemoryBudget("bytes", 1 << 30))
    report.record(Report("key", "1GiB", 1 << 30, None))
    plain_peaks.note_plain_bytes("cpu", 1 << 30)
    with pytest.warns(compile_remat.SettingWarning):
        budget_source.warn_ignored("1GiB", "a ratio")
    clear_process_state()
    assert compile_remat.reports() == [] and plain_peaks.largest_plain_bytes("cpu") == 0
    assert budget_of(torch.device("cpu"), "1GiB", MemoryBudget("bytes", 1 << 30)) is not before
    with pytest.warns(compile_remat.SettingWarning):
        budget_source.warn_ignored("1GiB", "a ratio")
    assert config.warn_unknown_variable.cache_info().currsize == 0
    clear_process_state()


def test_reports_alone_are_forgotten_by_reset_reports() -> None:
    before = budget_of(torch.device("cpu"), "2GiB", MemoryBudget("bytes", 2 << 30))
    report.record(Report("key", "2GiB", 2 << 30, None))
    compile_remat.reset_reports()
    assert compile_remat.reports() == []
    assert budget_of(torch.device("cpu"), "2GiB", MemoryBudget("bytes", 2 << 30)) is before
