"""The device table, device files, and the device of this machine.

A device is a handful of published figures. `devices.json` beside this module holds the table, with the documents that the
figures were taken from; a user's JSON file holds one object of the same form. Rates are dense: if a data sheet prints the
rate with structured sparsity, the table has half of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_remat._util import json_values
from compile_remat._util.suggestions import did_you_mean
from compile_remat.cost_models.device.description import Device
from compile_remat.cost_models.device.files import device_from_json
from compile_remat.errors import DeviceError

if TYPE_CHECKING:
    import torch

_TABLE = Path(__file__).with_name("devices.json")


def device_names() -> tuple[str, ...]:
    """Names in the table, in its order."""
    return tuple(_table())


def load_device(name_or_path: str) -> Device:
    """The device of that name in the table, or the one that a JSON file of the same shape describes.

    Raises:
        DeviceError: No such name (the message names the closest one), or a file that is missing, unreadable or incomplete.
    """
    table = _table()
    if name_or_path.lower() in table:
        return _from_table(name_or_path.lower(), table[name_or_path.lower()])
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise DeviceError(
            f'device = "{name_or_path}": no such device, and not a .json file. There are {", ".join(table)}.'
            + did_you_mean(name_or_path, table)
        )
    try:
        content = json_values.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(f'device = "{name_or_path}": the file cannot be read: {error.strerror}.') from error
    except ValueError as error:
        raise DeviceError(f'device = "{name_or_path}": the file is not JSON: {error}.') from error
    return device_from_json(path.stem, content, str(path))


def detect(device: torch.device) -> Device:
    """The figures of `device`: an entry of the table, on CUDA with the real memory size, or a conservative guess.

    The figures depend on the hardware alone, never on its load, so equal machines make equal plans.
    """
    if device.type == "cpu":
        return load_device("cpu")
    if device.type == "cuda":
        import torch

        return _from_properties(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device))
    return Device(
        device.type,
        None,
        bandwidth_bytes_per_s=100_000_000_000,
        flops_per_s=(("float32", 5_000_000_000_000),),
        sources=(f'a guess: no figures are known for devices of type "{device.type}"; name one with `device`',),
    )


def _from_properties(hardware_name: str, properties: Any) -> Device:
    """The table entry whose pattern matches the hardware's name, else conservative figures from its properties."""
    for name, entry in _table().items():
        if any(re.search(pattern, hardware_name) for pattern in entry.get("hardware", ())):
            return replace(_from_table(name, entry), memory_bytes=int(properties.total_memory))
    import torch

    # Every NVIDIA GPU since 2014 does 128 fused multiply-adds a clock and multiprocessor, or half as many.
    clock_hz = 1000 * getattr(properties, "clock_rate", 1_000_000)
    float32 = int(properties.multi_processor_count * 128 * clock_hz)
    bus_bytes = getattr(properties, "memory_bus_width", 0) // 8
    bandwidth = 2 * bus_bytes * 1000 * getattr(properties, "memory_clock_rate", 0)
    rates = {"float32": float32, "float16": 2 * float32}
    major = getattr(properties, "major", 0)
    if major >= 8:
        rates["bfloat16"] = 2 * float32
    return Device(
        hardware_name,
        int(properties.total_memory),
        bandwidth_bytes_per_s=bandwidth or 300_000_000_000,
        flops_per_s=tuple(sorted(rates.items())),
        l2_bytes=getattr(properties, "L2_cache_size", 0) or None,
        multiprocessors=int(properties.multi_processor_count),
        blas_workspace_bytes=32 << 20 if (major, getattr(properties, "minor", 0)) == (9, 0) else 8320 << 10,
        compute_capability=f"{major}.{getattr(properties, 'minor', 0)}"
        if major and torch.version.hip is None
        else None,
        sources=("torch.cuda.get_device_properties: memory as measured, rates a careful guess from clocks and units",),
    )


def _from_table(name: str, entry: Mapping[str, Any]) -> Device:
    return device_from_json(name, entry, f"the device table, {name}")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table
