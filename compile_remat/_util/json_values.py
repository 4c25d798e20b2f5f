"""Reads dataclasses from JSON files that may be foreign or incomplete; each field of the result has its annotated type."""

from __future__ import annotations

import functools
import json
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError if it is not JSON, or nested too deeply for Python's parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_as(kind: type[T], value: object) -> T:
    """Returns a dataclass from a JSON object with its fields: numbers, texts, lists for tuples, names for enums, dataclasses.

    Raises:
        ValueError: A field is missing, unknown or of another type; the text names the field.
    """
    found: T = _read(kind, value, kind.__name__)
    return found


def _read(kind: Any, value: object, where: str) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return _read_union(get_args(kind), value, where)
    if get_origin(kind) is tuple:
        return _read_tuple(get_args(kind), value, where)
    if is_dataclass(kind):
        return _read_fields(kind, value, where)
    if issubclass(kind, Enum):
        if not isinstance(value, str) or value not in kind.__members__:
            raise ValueError(f"{where} is {_shown(value)}, none of {', '.join(kind.__members__)}")
        return kind[value]
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {_shown(value)}, no {kind.__name__}")
    return value


def _read_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {_shown(value)}, no list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{where} has {len(value)} items, not {len(kinds)}")
    return tuple(_read(kind, item, f"{where}[{k}]") for k, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _read_union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    (kind,) = (k for k in kinds if k is not NoneType)
    return _read(kind, value, where)


def _read_fields(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}, no object")
    hints, known = _hints(kind), {f.name: f for f in fields(kind)}
    if unknown := value.keys() - known.keys():
        raise ValueError(f"{where} has no field {min(unknown)!r}")
    missing = [name for name, f in known.items() if f.default is MISSING and name not in value]
    if missing:
        raise ValueError(f"{where} lacks the field {missing[0]!r}")
    return kind(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _shown(value: object) -> str:
    text = type(value).__name__ if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
