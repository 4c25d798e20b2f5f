"""The command: subcommands, exit status, and that help imports nothing heavy."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_remat import cli
from compile_remat.cli import doctor
from compile_remat.errors import BudgetError

ROOT = Path(cli.__file__).resolve().parent.parent.parent


def test_help_lists_the_commands_without_importing_them_or_torch() -> None:
    modules = sorted({command.module for command in cli.COMMANDS} | {"torch", "numpy", "compile_remat.api"})
    program = (
        "import sys; from compile_remat.cli import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit: print([name for name in {modules!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert all(command.name in done.stdout for command in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_can_be_loaded() -> None:
    for command in cli.COMMANDS:
        assert callable(getattr(importlib.import_module(command.module), command.run))


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demmo"])
    assert stopped.value.code == 2
    assert "demmo" in capsys.readouterr().err


def test_our_errors_become_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: object) -> int:
        raise BudgetError(10 << 20, 20 << 20)

    monkeypatch.setattr(doctor, "run_doctor", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("compile-remat doctor: no plan fits")


def test_devices_prints_figures_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["devices"]) == 0
    table, _, sources = capsys.readouterr().out.partition("\nsources\n")
    assert any(line.startswith("h200 ") for line in table.splitlines())
    assert "\nh200:\n  " in sources
    assert any(line.split()[:3] == ["infiniband-ndr", "InfiniBand", "50"] for line in table.splitlines())
    assert "\nnvlink-4:\n  bandwidth: " in sources


def test_versions_and_the_table_of_devices_need_no_torch() -> None:
    program = (
        "import sys; from compile_remat.cli import main\n"
        "main(['devices'])\n"
        "try: main(['--version'])\n"
        "except SystemExit as stopped: print(stopped.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    version, ended = done.stdout.splitlines()[-2:]
    assert version.startswith("compile-remat ") and f"torch {importlib.metadata.version('torch')}" in version
    assert ended == "0 False"


def test_settings_say_where_they_came_from() -> None:
    rows = {finding.what: finding.value for finding in doctor.settings({"REMAT_MEMORY_BUDGET": "8GiB"})}
    assert "environment, REMAT_MEMORY_BUDGET" in rows["memory_budget"]
    assert rows["compiler"] == "inductor  (default)"


def test_a_missing_compiler_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "set CXX" in doctor.cpp_compiler().problem


def test_memory_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "host_free_bytes", lambda: 3 << 30)
    for name in ("node0", "node1", "nothing"):
        (tmp_path / name).mkdir()
    assert re.fullmatch(r"3.0 GiB free, locked memory \(ulimit -l\) [^,]+, 2 NUMA nodes", doctor.host(tmp_path).value)
    monkeypatch.setattr(doctor, "host_free_bytes", lambda: None)
    assert doctor.host(tmp_path / "absent").value.startswith("free memory not reported by the system, locked")


def test_optional_packages_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    problems = {finding.what for finding in doctor.versions() if finding.problem}
    assert problems == {"compile-remat", "torch", "scipy", "numpy"}


def test_the_way_past_accelerates_list_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.0")
    (fine,) = doctor.accelerate({"ACCELERATE_DYNAMO_BACKEND": "inductor"})
    assert 'model.compile(backend="remat", options=...) before the Trainer' in fine.value and not fine.problem
    (refused,) = doctor.accelerate({"ACCELERATE_DYNAMO_BACKEND": "REMAT"})
    assert "unset ACCELERATE_DYNAMO_BACKEND" in refused.problem


def test_a_closed_pipe_and_an_interrupt_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = f"{sys.executable} -m compile_remat devices | head -1"
    found = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    assert found.stdout.count("\n") == 1 and found.stderr == ""

    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    def while_a_class_is_made(arguments: object) -> int:  # as Python 3.11 says it
        raise RuntimeError("Error calling __set_name__ on 'Field' instance 'x' in 'A'") from KeyboardInterrupt()

    for run in (interrupted, while_a_class_is_made):
        monkeypatch.setattr("compile_remat.cli.devices.run_devices", run)
        assert cli.main(["devices"]) == 130
        assert capsys.readouterr().err == "compile-remat devices: interrupted\n"


def test_an_error_of_something_else_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> int:
        raise RuntimeError("no such device")

    monkeypatch.setattr("compile_remat.cli.devices.run_devices", broken)
    with pytest.raises(RuntimeError, match="no such device"):
        cli.main(["devices"])
