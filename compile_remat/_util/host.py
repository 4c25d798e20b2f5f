"""Reads facts of this machine from the operating system: the processor's name and the free memory."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path


@functools.cache
def processor_name(table: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's model name, or its architecture if the system has no model name."""
    names = re.findall(r"^model name\s*:\s*(.+)$", table.read_text(), re.MULTILINE) if table.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def host_free_bytes(table: Path = Path("/proc/meminfo")) -> int | None:
    """Returns the bytes that the host can allocate without swapping; None if the system does not report them."""
    if not table.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", table.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
