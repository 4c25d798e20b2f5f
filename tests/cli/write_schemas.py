"""Writes `compile_remat/cli/schemas.json`: the JSON Schema of every command's output, of dataclasses and docs/reference/json.md.

python -m tests.cli.write_schemas
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from compile_remat.cli.schema import FILE
from compile_remat.forecast.device_choice import DeviceRow
from compile_remat.forecast.forecasting import Forecast
from compile_remat.forecast.mesh.rank_figures import RankForecast
from compile_remat.passes import Plan

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
FACTS = {"type": "string", "enum": ["observed", "estimated"]}
KEYS: dict[str, dict[str, Any]] = {
    "plan": {"schema": {"const": 1}, "status": {}},
    "forecast": {"total_bytes": int, "fits": bool | None, "step_time_ns": int, "facts": FACTS, "peak_bytes": int},
    "rank": {
        "total_bytes": int,
        "fits": bool | None,
        "exposed_time_ns": int | None,
        "host_bytes": int,
        "node_host_bytes": int,
        "facts": FACTS,
        "why": str,
    },
    "row": {
        "device": str,
        "limit_bytes": int | None,
        "total_bytes": int,
        "fits": bool | None,
        "peak_bytes": int,
        "step_time_ns": int,
        "extra_share": float,
        "largest_batch": int | None,
        "largest_batch_total_bytes": int | None,
        "largest_batch_step_time_ns": int | None,
        "largest_batch_extra_share": float | None,
        "samples_per_s": float | None,
        "tokens_per_s": float | None,
        "why": str,
        "time_note": str,
        "facts": FACTS,
    },
}
"""Keys that are no fields of a dataclass, with their types."""


def described(name: str) -> dict[str, str]:
    """The text of the page on each key that is no field."""
    text = (
        PAGE.read_text().partition(f"<!-- keys of a {name}: begin -->\n")[2].partition(f"<!-- keys of a {name}: end")[0]
    )
    found = re.findall(r"^- `(\w+)`: (.*?)[;.]?$(?=\n- |\n*\Z)", text, re.MULTILINE | re.DOTALL)
    return {key: re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(told.split())) for key, told in found}


def told_of(kind: type) -> dict[str, str]:
    """The text of a docstring on each field; several names with commas between have the same text."""
    _, _, text = (inspect.getdoc(kind) or "").partition("Attributes:\n")
    found = re.findall(r"^    ([\w, ]+): (.*?)$(?=\n    \w|\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(told.split()) for names, told in found for name in names.split(", ")}


class Definitions(dict[str, Any]):
    """`$defs`, by the names of dataclasses."""

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type; a dataclass becomes a definition."""
        if isinstance(kind, dict):
            return kind
        if kind in NAMES:
            return {"type": NAMES[kind]}
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self.any_of([self.of(each) for each in arguments])
        if origin is tuple and arguments[-1] is Ellipsis:
            return {"type": "array", "items": self.of(arguments[0])}
        if origin is tuple:
            return {"type": "array", "prefixItems": [self.of(each) for each in arguments], "items": False}
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if is_dataclass(kind):
            return self.define(kind.__name__, kind)
        if issubclass(kind, Enum):
            return {"type": "string", "enum": list(kind.__members__)}
        raise TypeError(kind)

    def any_of(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Either of the schemas, in a short form for simple types."""
        if all(set(each) == {"type"} for each in found):
            return {"type": [each["type"] for each in found]}
        return {"anyOf": found}

    def define(self, name: str, kind: Any = None, keys: str = "") -> dict[str, Any]:
        """Define an object with the fields of a dataclass and the keys of the page; returns a reference to it."""
        keys = "plan" if kind is Plan else keys
        if name not in self:
            self[name] = {}
            hints = get_type_hints(kind) if kind else {}
            told = {**(told_of(kind) if kind else {}), **described(keys)}
            of_fields = {f.name: self.of(hints[f.name]) for f in fields(kind) if f.name != "pictures"} if kind else {}
            of_keys = {key: self.of(each) for key, each in KEYS.get(keys, {}).items() if each != {}}
            properties = {**of_fields, **of_keys}
            self[name] = {
                "type": "object",
                "properties": {
                    key: {**each, "description": told[key]} if key in told else each for key, each in properties.items()
                },
                "required": list(properties),
            }
        return {"$ref": f"#/$defs/{name}"}


def schemas() -> dict[str, Any]:
    """The document: a definition for each output, and those that they need."""
    found = Definitions()
    plan = found.of(Plan)
    outputs = {
        "plan": found.define("Forecast", Forecast, "forecast"),
        "plan-mesh": found.define("RankForecast", RankForecast, "rank"),
        "plan-devices": {"type": "array", "items": found.define(DeviceRow.__name__, keys="row")},
        "explain": {"allOf": [plan, found.define("Facts")]},
        "pareto": {"type": "array", "items": {"$ref": "#/$defs/explain"}},
    }
    why = {"type": "string", "description": found["Forecast"]["properties"]["why"]["description"]}
    found["Facts"] |= {"properties": {"facts": FACTS, "why": why}, "required": ["facts", "why"]}
    definitions = {**outputs, **found}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions}


if __name__ == "__main__":
    FILE.write_text(json.dumps(schemas(), indent=1) + "\n")
