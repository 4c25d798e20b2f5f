"""Free memory of the host, and of the control groups that hold a process to less."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_remat._util.host import host_free_bytes

MIB = 1 << 20


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    written(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8192 kB\n"})
    return tmp_path / "proc/meminfo"


def test_without_groups_it_is_the_hosts(tmp_path: Path, table: Path) -> None:
    assert host_free_bytes(table, tmp_path) == 8 * MIB


def test_a_limit_of_the_second_version_counts_without_cached_files(tmp_path: Path, table: Path) -> None:
    group = {"memory.max": f"{6 * MIB}\n", "memory.current": f"{3 * MIB}\n", "memory.stat": f"inactive_file {MIB}\n"}
    written(tmp_path, {"proc/self/cgroup": "0::/jobs/one\n"})
    written(tmp_path / "sys/fs/cgroup/jobs/one", group)
    assert host_free_bytes(table, tmp_path) == 4 * MIB


def test_a_limit_of_an_outer_group_counts(tmp_path: Path, table: Path) -> None:
    written(tmp_path, {"proc/self/cgroup": "0::/jobs/one\n"})
    inner = {"memory.max": "max\n", "memory.current": "0\n", "memory.stat": ""}
    outer = {"memory.max": f"{5 * MIB}\n", "memory.current": f"{4 * MIB}\n", "memory.stat": "file 3\n"}
    written(tmp_path / "sys/fs/cgroup/jobs/one", inner)
    written(tmp_path / "sys/fs/cgroup/jobs", outer)
    assert host_free_bytes(table, tmp_path) == MIB


def test_a_container_sees_its_group_as_the_top(tmp_path: Path, table: Path) -> None:
    written(tmp_path, {"proc/self/cgroup": "0::/../../pod\n"})
    written(tmp_path / "sys/fs/cgroup", {"memory.max": f"{2 * MIB}", "memory.current": "0", "memory.stat": ""})
    assert host_free_bytes(table, tmp_path) == 2 * MIB


def test_a_limit_of_the_first_version(tmp_path: Path, table: Path) -> None:
    written(tmp_path, {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod\n0::/\n"})
    group = {"memory.limit_in_bytes": f"{7 * MIB}", "memory.usage_in_bytes": f"{8 * MIB}", "memory.stat": ""}
    written(tmp_path / "sys/fs/cgroup/memory/pod", group)
    assert host_free_bytes(table, tmp_path) == 0
