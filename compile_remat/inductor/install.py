"""A partitioner as Inductor's process-wide setting: what it is set to, and what was there before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_remat.inductor.entry import PARTITIONER_OPTION, CustomPartitionerFn

_replaced: dict[str, Any] = {}
"""What Inductor's own settings were before `set_global_partitioner`."""


def set_global_partitioner(partitioner: CustomPartitionerFn | None, options: Mapping[str, Any] | None = None) -> None:
    """Inductor's process-wide partitioner, with process-wide options; None restores what was there before."""
    from torch._inductor import config

    for name, value in _replaced.items():
        setattr(config, name, value)
    _replaced.clear()
    if partitioner is not None:
        wanted = {**(options or {}), PARTITIONER_OPTION: partitioner}
        _replaced.update({name: getattr(config, name) for name in wanted})
        for name, value in wanted.items():
            setattr(config, name, value)
