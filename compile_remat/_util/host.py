"""What the operating system says of this machine: its processor, and how much memory it can give."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path


@functools.cache
def processor_name(table: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as people write it, or at least its kind."""
    names = re.findall(r"^model name\s*:\s*(.+)$", table.read_text(), re.MULTILINE) if table.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def host_free_bytes(table: Path = Path("/proc/meminfo")) -> int | None:
    """What the host can give without swapping; None where the system does not say."""
    if not table.exists():
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", table.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
