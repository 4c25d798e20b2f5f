"""Reads facts of this machine from the operating system: the processor's name, free memory, the limits of a container."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def processor_name(table: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's model name, or its architecture if the system has no model name."""
    names = re.findall(r"^model name\s*:\s*(.+)$", table.read_text(), re.MULTILINE) if table.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def host_free_bytes(table: Path = Path("/proc/meminfo"), root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can allocate without swapping; None if the system does not report them.

    They are the host's, or what the control groups of the process leave of their limits, as in a container.

    Args:
        root: Folder of `proc` and `sys`, from which the control groups are read.
    """
    if not table.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", table.read_text(), re.MULTILINE)
    return min([int(found[1]) * 1024, *_left_by_groups(root)]) if found else None


GROUPS = (
    (r"^0::(.*)$", "", "memory.max", "memory.current", "inactive_file"),
    (
        r"^\d+:(?:\w+,)*memory(?:,\w+)*:(.*)$",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
"""Versions 2 and 1 of control groups: line of ``/proc/self/cgroup``, folder, files of limit and use, cached files in the use."""


def _left_by_groups(root: Path) -> Iterator[int]:
    """Bytes that the limit of each control group of the process, and of each group around it, leaves to it."""
    membership = root / "proc/self/cgroup"
    lines = membership.read_text() if membership.exists() else ""
    for pattern, folder, limit, use, cached in GROUPS:
        found = re.search(pattern, lines, re.MULTILINE)
        top = root / "sys/fs/cgroup" / folder
        inner = top / found[1].strip("/") if found else top
        for group in (inner, *inner.parents):
            if (group / limit).exists() and (group / use).exists():
                most = (group / limit).read_text().strip()
                reclaimable = re.search(rf"^{cached} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                used = int((group / use).read_text()) - (int(reclaimable[1]) if reclaimable else 0)
                yield from () if most == "max" else (max(0, int(most) - used),)
            if group == top:
                break
