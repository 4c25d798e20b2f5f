"""`compile-remat schema`: prints the JSON Schema of what the other commands print under `--json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FILE = Path(__file__).with_name("schemas.json")
OUTPUTS = ("plan", "plan-mesh", "plan-devices", "explain", "pareto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the command."""
    parser.add_argument(
        "output", choices=OUTPUTS, help="whose --json; plan-mesh and plan-devices: of plan with that flag"
    )


def run_schema(arguments: argparse.Namespace) -> int:
    """Print one JSON Schema (draft 2020-12) as JSON."""
    print(json.dumps(schema_of(arguments.output), indent=1))
    return 0


def schema_of(output: str) -> dict[str, object]:
    """Returns the schema of one of `OUTPUTS`."""
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return {"$schema": document["$schema"], "$ref": f"#/$defs/{output}", "$defs": document["$defs"]}
