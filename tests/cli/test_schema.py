"""The published JSON Schema: made of the dataclasses, and true of every command's output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile_remat import cli
from compile_remat.cli.schema import FILE, OUTPUTS, schema_of
from tests.cli.write_schemas import schemas

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


def test_largest_is_the_tensors_of_a_plan_alone() -> None:
    definitions = json.loads(FILE.read_text())["$defs"]
    assert [name for name, each in definitions.items() if "largest" in each.get("properties", {})] == ["Plan"]
    assert "largest_batch" in definitions["Forecast"]["required"]
