"""The files that a command hands to the C++ compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import compiler_calls

CALLS = """
import os, subprocess
print("caches in", os.environ["TORCHINDUCTOR_CACHE_DIR"])
subprocess.run([os.environ["CXX"], "-c", "kernels.cpp"], check=True)
"""


def test_each_file_for_the_compiler_counts_once(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    compiler = compiler_calls.logging_compiler(tmp_path, log, "true")
    for arguments in (
        ["--version"],
        ["-O3", "a.cpp", "-o", "a.so"],
        ["a.cpp"],
        ["-c", "b.cpp"],
        ["p.h", "-o", "p.gch"],
    ):
        subprocess.run([str(compiler), *arguments], check=True)
    assert compiler_calls.files_of(log) == {"a.cpp", "b.cpp", "p.h"}


def test_a_command_runs_with_folders_and_a_compiler_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    for _ in range(2):  # the calls of one command are not those of the next
        output, files = compiler_calls.run_counted([sys.executable, "-c", CALLS], tmp_path)
        assert files == {"kernels.cpp"}
        assert output.strip() == f"caches in {tmp_path / 'inductor'}"
