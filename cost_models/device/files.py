"""Devices as JSON objects: reads them, with every figure checked, and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from compile_remat._util.suggestions import did_you_mean
from compile_remat.cost_models.device.description import (
    DEFAULT_LAUNCH_NS,
    DTYPES,
    GPU_EFFICIENCY,
    GPU_HALF_SIZES,
    HOST_COPY_SLOWDOWN,
    Device,
)
from compile_remat.cost_models.device.links import load_link
from compile_remat.errors import DeviceError

_FIELDS = tuple(f.name for f in fields(Device) if f.name != "name")
_LARGEST = 1e30
"""Limit above any figure of hardware; Python's JSON parser accepts infinity."""

_REQUIRED = ("bandwidth_bytes_per_s", "flops_per_s")
_OPTIONAL_COUNTS = (
    "memory_bytes",
    "host_bandwidth_bytes_per_s",
    "to_host_bytes_per_s",
    "from_host_bytes_per_s",
    "l2_bytes",
    "l2_bandwidth_bytes_per_s",
    "multiprocessors",
    "blas_workspace_bytes",
)


def device_from_json(name: str, content: Any, where: str) -> Device:
    """A device from the object of a JSON file, checked field by field.

    Args:
        name: The device's name if the object has none.
        where: The name of the file or table in errors.

    Raises:
        DeviceError: A figure is missing, unknown, or not of its type and range.
    """
    if not isinstance(content, Mapping):
        raise DeviceError(f"{where}: a device is a JSON object, found {type(content).__name__}.")
    for field in _REQUIRED:
        if field not in content:
            raise DeviceError(f'{where}: "{field}" is missing. Required: {", ".join(_REQUIRED)}.')
    for field in content:
        if field not in (*_FIELDS, "name", "hardware"):
            raise DeviceError(f'{where}: "{field}" is not a field of a device file.{did_you_mean(field, _FIELDS)}')
    rates = content["flops_per_s"]
    if not isinstance(rates, Mapping) or "float32" not in rates:
        raise DeviceError(f'{where}: "flops_per_s" has to map types to rates and to hold "float32".')
    for dtype in rates:
        if dtype not in DTYPES:
            raise DeviceError(f'{where}: no type "{dtype}" in "flops_per_s"; there are {", ".join(DTYPES)}.')
    counts = {field: _count(content.get(field), field, where) for field in _OPTIONAL_COUNTS}
    return Device(
        name=str(content.get("name", name)),
        bandwidth_bytes_per_s=int(_positive(content["bandwidth_bytes_per_s"], "bandwidth_bytes_per_s", where)),
        flops_per_s=tuple(sorted((d, int(_positive(r, f"flops_per_s of {d}", where))) for d, r in rates.items())),
        launch_ns=int(_positive(content.get("launch_ns", DEFAULT_LAUNCH_NS), "launch_ns", where)),
        efficiency=_fractions(content.get("efficiency", dict(GPU_EFFICIENCY)), "efficiency", where),
        half_sizes=_half_sizes(_default_half_sizes(content), where),
        launches_ns=tuple((k, int(v)) for k, v in _fractions(content.get("launches_ns", {}), "launches_ns", where)),
        sources=_texts(content.get("sources", ()), "sources", where)
        or (f"file {where.rpartition('/')[2]}, no sources named",),
        node_link=_link(content.get("node_link"), "node_link", where),
        network_link=_link(content.get("network_link"), "network_link", where),
        sustained_clock_ratio=_ratio(content.get("sustained_clock_ratio", 1.0), "sustained_clock_ratio", where),
        host_copy_slowdown=_part(content.get("host_copy_slowdown", HOST_COPY_SLOWDOWN), "host_copy_slowdown", where),
        compute_capability=_capability(content.get("compute_capability"), where),
        **counts,
    )


def device_to_json(device: Device) -> dict[str, Any]:
    """The object that `device_from_json` reads back as an equal device; fields that are None are left out."""
    content: dict[str, Any] = {}
    for field in fields(Device):
        value = getattr(device, field.name)
        if value is None:
            continue
        if field.name in ("flops_per_s", "efficiency", "half_sizes", "launches_ns"):
            value = {key: list(figure) if isinstance(figure, tuple) else figure for key, figure in value}
        content[field.name] = list(value) if isinstance(value, tuple) else value
    return content


def _default_half_sizes(content: Mapping[str, Any]) -> Any:
    """The given `half_sizes`; else `GPU_HALF_SIZES` if the efficiency is left to the GPU defaults, too, and else none."""
    return content.get("half_sizes", {} if "efficiency" in content else dict(GPU_HALF_SIZES))


def _half_sizes(value: Any, where: str) -> tuple[tuple[str, tuple[float, ...]], ...]:
    if not isinstance(value, Mapping):
        raise DeviceError(f'{where}: "half_sizes" has to map kinds of operators to three lengths.')
    for key, lengths in value.items():
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or len(lengths) != 3:
            raise DeviceError(f'{where}: "half_sizes" of {key} has to be three lengths (m, n, k), found {lengths!r}.')
        for length in lengths:
            if isinstance(length, bool) or not isinstance(length, int | float) or not 0 <= length <= _LARGEST:
                raise DeviceError(f'{where}: a length in "half_sizes" of {key} has to be 0 or more, found {length!r}.')
    return tuple(sorted((str(key), tuple(float(length) for length in lengths)) for key, lengths in value.items()))


def _fractions(value: Any, field: str, where: str) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        raise DeviceError(f'{where}: "{field}" has to map kinds of operators to numbers.')
    return tuple(sorted((str(k), _positive(v, f"{field} of {k}", where)) for k, v in value.items()))


def _link(value: Any, field: str, where: str) -> str | None:
    if value is None:
        return None
    try:
        return load_link(str(value)).name
    except DeviceError as error:
        raise DeviceError(f'{where}: "{field}": {error}') from None


def _capability(value: Any, where: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or re.fullmatch(r"\d+\.\d", value) is None:
        raise DeviceError(f'{where}: "compute_capability" has to be a text such as "9.0", found {value!r}.')
    return value


def _count(value: Any, field: str, where: str) -> int | None:
    return None if value is None else int(_positive(value, field, where))


def _positive(value: Any, field: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DeviceError(f'{where}: "{field}" has to be a number above 0, found {value!r}.')
    if value > _LARGEST:
        raise DeviceError(f'{where}: "{field}" is beyond any hardware: at most {_LARGEST:g}.')
    return value


def _ratio(value: Any, field: str, where: str) -> float:
    if _positive(value, field, where) > 1:
        raise DeviceError(f'{where}: "{field}" has to be at most 1, found {value!r}.')
    return float(value)


def _part(value: Any, field: str, where: str) -> float:
    """A number from 0 to 1."""
    return 0.0 if value == 0 and not isinstance(value, bool) else _ratio(value, field, where)


def _texts(value: Any, field: str, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise DeviceError(f'{where}: "{field}" has to be a list of texts, found {value!r}.')
    return tuple(str(text) for text in value)
