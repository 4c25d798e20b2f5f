"""The published JSON Schema: made of the dataclasses, and true of every command's output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile_remat import cli
from compile_remat.cli.schema import FILE, OUTPUTS, schema_of
from tests.cli.write_schemas import KEYS, described, schemas

MODEL = ["tests.planned_models:convolution", "--device", "h100-sxm", "--estimate", "--json"]
COMMANDS = {
    "plan": ["plan", *MODEL, "--compare"],
    "plan-mesh": ["plan", "tests.forecast.mesh.models:stack", "--device", "h100-sxm", "--mesh", "dp=2", "--json"],
    "plan-devices": ["plan", MODEL[0], "--devices", "t4,h100-sxm", "--json"],
    "explain": ["explain", *MODEL],
    "pareto": ["pareto", *MODEL, "--points", "3"],
}
KINDS = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


UNKNOWN = (
    "a field of its dataclass, or a row in KEYS of tests/cli/write_schemas.py; then python -m tests.cli.write_schemas"
)


def known_keys(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """The keys of an object that a schema describes, by itself or by its parts."""
    if "$ref" in schema:
        return known_keys(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return set(schema.get("properties", ())).union(*(known_keys(each, definitions) for each in schema.get("allOf", ())))


def unknown_keys(
    value: object, schema: dict[str, Any], definitions: dict[str, Any], where: str = "$", *, is_part: bool = False
) -> list[str]:
    """Keys that a command writes and its schema lacks; programs that read the output may find more keys in a later version.

    Args:
        is_part: True if other schemas describe the object as well.
    """
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return unknown_keys(value, target, definitions, where, is_part=is_part)
    found = [text for s in schema.get("allOf", ()) for text in unknown_keys(value, s, definitions, where, is_part=True)]
    for alternative in schema.get("anyOf", ()):
        if not problems(value, alternative, definitions):
            found += unknown_keys(value, alternative, definitions, where)
    if isinstance(value, dict) and "additionalProperties" not in schema:
        known = known_keys(schema, definitions)
        found += (
            [] if is_part or not known else [f"{where}: {key} is not in the schema" for key in value.keys() - known]
        )
    if isinstance(value, dict):
        for key, item in value.items():
            below = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            found += unknown_keys(item, below, definitions, f"{where}.{key}")
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        for k, item in enumerate(value):
            below = first[k] if k < len(first) else schema.get("items") or {}
            found += unknown_keys(item, below, definitions, f"{where}[{k}]")
    return found


def problems(value: object, schema: dict[str, Any], definitions: dict[str, Any], where: str = "$") -> list[str]:
    """Where a value is not as the schema says: references, types, required keys, items, enums and alternatives."""

    def inside(value: object, schema: dict[str, Any], where: str = where) -> list[str]:
        return problems(value, schema, definitions, where)

    if "$ref" in schema:
        return inside(value, definitions[schema["$ref"].removeprefix("#/$defs/")])
    found = [text for each in schema.get("allOf", []) for text in inside(value, each)]
    if "anyOf" in schema and all(inside(value, each) for each in schema["anyOf"]):
        found.append(f"{where}: none of the alternatives")
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        found.append(f"{where}: {value!r}")
    names = schema.get("type", [])
    kinds = [KINDS[name] for name in ([names] if isinstance(names, str) else names)]
    if kinds and type(value) not in kinds and not (type(value) is int and float in kinds):
        return [*found, f"{where}: {type(value).__name__} is none of {names}"]
    if isinstance(value, dict):
        found += [f"{where}: lacks {key}" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            below = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
            found += inside(item, below, f"{where}.{key}")
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        for k, item in enumerate(value):
            found += inside(item, first[k] if k < len(first) else schema.get("items") or {}, f"{where}[{k}]")
    return found


def test_the_file_is_that_of_the_dataclasses() -> None:
    assert json.loads(FILE.read_text()) == schemas(), "run python -m tests.cli.write_schemas"


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_are_as_their_schemas_say(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", output]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == schema_of(output)
    assert cli.main(COMMANDS[output]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert problems(printed, schema, schema["$defs"]) == []
    assert unknown_keys(printed, schema, schema["$defs"]) == [], f"each key needs a place in the schema: {UNKNOWN}"
    try:
        import jsonschema
    except ImportError:
        return
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(printed, schema)


def test_an_output_that_differs_is_seen() -> None:
    schema = schema_of("plan-devices")
    definitions: dict[str, Any] = schema["$defs"]  # type: ignore[assignment]
    (first,) = problems([{**dict.fromkeys(definitions["DeviceRow"]["required"])}], schema, definitions)[:1]
    assert first == "$[0].device: NoneType is none of string"


def test_a_key_that_the_schema_lacks_is_seen() -> None:
    """At the top, in a list, and in an object that two schemas describe."""
    row = schema_of("plan-devices")
    assert unknown_keys([{"device": "l4", "new": 1}], row, row["$defs"]) == ["$[0]: new is not in the schema"]
    explained = schema_of("explain")
    plan = {"facts": "observed", "peak_bytes": 1, "largest": [{"new": 1}], "more": 2}
    assert unknown_keys(plan, explained, explained["$defs"]) == [
        "$.largest[0]: new is not in the schema", "$: more is not in the schema",
    ]  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_those_of_the_page(name: str) -> None:
    """A test of tests/test_reference.py compares the page with what the code writes."""
    file = "KEYS in tests/cli/write_schemas.py"
    assert KEYS[name].keys() == described(name).keys(), (
        f'{file} and "keys of a {name}" in docs/reference/json.md differ'
    )


def test_largest_is_the_tensors_of_a_plan_alone() -> None:
    definitions = json.loads(FILE.read_text())["$defs"]
    assert [name for name, each in definitions.items() if "largest" in each.get("properties", {})] == ["Plan"]
    assert "largest_batch" in definitions["Forecast"]["required"]
