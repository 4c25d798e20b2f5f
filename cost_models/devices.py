"""The device table, device files, and the device that is here.

A device is a handful of published figures. `devices.json` beside this module holds those of the table, each with the
document that it was taken from; a user's JSON file holds one such object. Rates are dense: where a data sheet prints
the rate with structured sparsity, half of it stands here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compile_remat.errors import DeviceError
from compile_remat.names import did_you_mean

_TABLE = Path(__file__).with_name("devices.json")

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
"""Types of arithmetic that a device may state a rate for; float32 it must."""

_FALLBACK = {"tf32": "float32", "bfloat16": "float32", "float16": "float32", "float8": "bfloat16"}

GPU_EFFICIENCY = (
    ("attention", 0.5),
    ("bandwidth", 0.8),
    ("conv", 0.5),
    ("matmul", 0.7),
    ("other", 0.5),
    ("pointwise", 0.5),
    ("reduction", 0.5),
)
"""Fraction of the published figures that kernels reach: for each kind of operator of the rate, and of the bandwidth.

Assumed, not measured: one rule-of-thumb constant each, to be replaced by measurements. Pointwise code gets half because
not all of it is multiply-adds.
"""

DEFAULT_LAUNCH_NS = 4_000
"""Time that a GPU kernel takes before it does anything: assumed, of the order of a few microseconds."""


@dataclass(frozen=True)
class Device:
    """Figures of one device.

    Attributes:
        name: name in the table, or of the file or hardware it came from.
        memory_bytes: capacity, or None where it does not limit or is not known.
        bandwidth_bytes_per_s: of device memory, read and write together.
        flops_per_s: dense rate for each type of `DTYPES` that the device states, sorted by type.
        launch_ns: time of an empty kernel, in nanoseconds.
        read_limit: how many reads Inductor lets one fused expression gather before it writes it to memory: 8 on GPUs
            (``realize_acc_reads_threshold``), 12 on CPU.
        efficiency: fraction of the rate reached by each kind of operator, and of the bandwidth; sorted. Absent is 1.
        sources: the documents that the figures come from.
    """

    name: str
    memory_bytes: int | None
    bandwidth_bytes_per_s: int
    flops_per_s: tuple[tuple[str, int], ...]
    launch_ns: int = DEFAULT_LAUNCH_NS
    read_limit: int = 8
    efficiency: tuple[tuple[str, float], ...] = GPU_EFFICIENCY
    sources: tuple[str, ...] = ()

    def rate(self, dtype: str) -> int:
        """Dense operations per second in `dtype`; for a type it does not state, that of the wider type it runs as."""
        rates = dict(self.flops_per_s)
        while dtype not in rates:
            dtype = _FALLBACK.get(dtype, "float32")
        return rates[dtype]

    def efficiency_of(self, what: str) -> float:
        """Fraction of the published figure that is reached: `what` is a kind of operator or "bandwidth"."""
        return dict(self.efficiency).get(str(what), 1.0)


def device_names() -> tuple[str, ...]:
    """Names in the table, in its order."""
    return tuple(_table())


def load_device(name_or_path: str) -> Device:
    """The device of that name in the table, or the one that a JSON file of the same shape describes.

    Raises:
        DeviceError: no such name (the closest is named), or a file that is missing, unreadable or incomplete.
    """
    table = _table()
    if name_or_path.lower() in table:
        return _from_json(name_or_path.lower(), table[name_or_path.lower()], "the device table")
    path = Path(name_or_path)
    if path.suffix != ".json":
        raise DeviceError(
            f'device = "{name_or_path}": no such device, and not a .json file. There are {", ".join(table)}.'
            + did_you_mean(name_or_path, table)
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeviceError(f'device = "{name_or_path}": the file cannot be read: {error.strerror}.') from error
    except ValueError as error:
        raise DeviceError(f'device = "{name_or_path}": the file is not JSON: {error}.') from error
    return _from_json(path.stem, content, str(path))


def detect(device: torch.device) -> Device:
    """The device that `device` is: an entry of the table with the memory that is really there, or a careful guess.

    The figures depend on the hardware alone, never on its load, so equal machines make equal plans.
    """
    if device.type == "cpu":
        return load_device("cpu")
    if device.type == "cuda":
        return _from_properties(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device))
    return Device(
        device.type,
        None,
        bandwidth_bytes_per_s=100_000_000_000,
        flops_per_s=(("float32", 5_000_000_000_000),),
        sources=(f'a guess: no figures are known for devices of type "{device.type}"; name one with `device`',),
    )


def _from_properties(hardware_name: str, properties: Any) -> Device:
    """Table entry whose pattern fits the hardware's name, or conservative figures from its properties."""
    for name, entry in _table().items():
        if any(re.search(pattern, hardware_name) for pattern in entry.get("hardware", ())):
            known = _from_json(name, entry, "the device table")
            return replace(known, memory_bytes=int(properties.total_memory))
    # 128 fused multiply-adds a clock and multiprocessor is what every NVIDIA GPU since 2014 has, or half of it.
    clock_hz = 1000 * getattr(properties, "clock_rate", 1_000_000)
    float32 = int(properties.multi_processor_count * 128 * clock_hz)
    bus_bytes = getattr(properties, "memory_bus_width", 0) // 8
    bandwidth = 2 * bus_bytes * 1000 * getattr(properties, "memory_clock_rate", 0)
    rates = {"float32": float32, "float16": 2 * float32}
    if getattr(properties, "major", 0) >= 8:
        rates["bfloat16"] = 2 * float32
    return Device(
        hardware_name,
        int(properties.total_memory),
        bandwidth_bytes_per_s=bandwidth or 300_000_000_000,
        flops_per_s=tuple(sorted(rates.items())),
        sources=("torch.cuda.get_device_properties: memory as measured, rates a careful guess from clocks and units",),
    )


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


_FIELDS = tuple(f.name for f in fields(Device) if f.name != "name")
_LARGEST = 1e30
"""Beyond any figure of hardware; JSON may hold infinity."""

_REQUIRED = ("bandwidth_bytes_per_s", "flops_per_s")


def _from_json(name: str, content: Any, where: str) -> Device:
    """A device from the object of a JSON file, checked field by field."""
    if not isinstance(content, Mapping):
        raise DeviceError(f"{where}: a device is a JSON object, found {type(content).__name__}.")
    for field in _REQUIRED:
        if field not in content:
            raise DeviceError(f'{where}: "{field}" is missing. Required: {", ".join(_REQUIRED)}.')
    for field in content:
        if field not in (*_FIELDS, "name", "hardware"):
            raise DeviceError(f'{where}: "{field}" is no figure of a device.{did_you_mean(field, _FIELDS)}')
    rates = content["flops_per_s"]
    if not isinstance(rates, Mapping) or "float32" not in rates:
        raise DeviceError(f'{where}: "flops_per_s" has to map types to rates and to hold "float32".')
    for dtype in rates:
        if dtype not in DTYPES:
            raise DeviceError(f'{where}: no type "{dtype}" in "flops_per_s"; there are {", ".join(DTYPES)}.')
    memory = content.get("memory_bytes")
    efficiency = content.get("efficiency", dict(GPU_EFFICIENCY))
    if not isinstance(efficiency, Mapping):
        raise DeviceError(f'{where}: "efficiency" has to map kinds of operators to fractions.')
    return Device(
        name=str(content.get("name", name)),
        memory_bytes=None if memory is None else int(_positive(memory, "memory_bytes", where)),
        bandwidth_bytes_per_s=int(_positive(content["bandwidth_bytes_per_s"], "bandwidth_bytes_per_s", where)),
        flops_per_s=tuple(sorted((d, int(_positive(r, f"flops_per_s of {d}", where))) for d, r in rates.items())),
        launch_ns=int(_positive(content.get("launch_ns", DEFAULT_LAUNCH_NS), "launch_ns", where)),
        read_limit=int(_positive(content.get("read_limit", 8), "read_limit", where)),
        efficiency=tuple(sorted((str(k), _positive(v, f"efficiency of {k}", where)) for k, v in efficiency.items())),
        sources=_texts(content.get("sources", ()), "sources", where) or (f"file {Path(where).name}, no sources named",),
    )


def _positive(value: Any, field: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DeviceError(f'{where}: "{field}" has to be a number above 0, found {value!r}.')
    if value > _LARGEST:
        raise DeviceError(f'{where}: "{field}" is beyond any hardware: at most {_LARGEST:g}.')
    return value


def _texts(value: Any, field: str, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DeviceError(f'{where}: "{field}" has to be a list of texts, found {value!r}.')
    return tuple(str(text) for text in value)
