"""A partitioner as an option of Inductor: its type, the option's name, and its installation for the whole process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch._inductor import config as inductor_config

from compile_remat._torch.version import private_name

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
else:
    CustomPartitionerFn = private_name("torch._inductor.custom_graph_pass", "CustomPartitionerFn")

PARTITIONER_OPTION = "custom_partitioner_fn"
"""The option of Inductor that holds a partitioner."""

_replaced: dict[str, Any] = {}
"""The values of Inductor's settings before `set_global_partitioner`."""


def set_global_partitioner(partitioner: CustomPartitionerFn | None, options: Mapping[str, Any] | None = None) -> None:
    """Set Inductor's process-wide partitioner and process-wide options; None restores the values from before."""
    for name, value in _replaced.items():
        setattr(inductor_config, name, value)
    _replaced.clear()
    if partitioner is not None:
        wanted = {**(options or {}), PARTITIONER_OPTION: partitioner}
        _replaced.update({name: getattr(inductor_config, name) for name in wanted})
        for name, value in wanted.items():
            setattr(inductor_config, name, value)
