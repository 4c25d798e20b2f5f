"""Whole numbers by name in a JSON file on disk, which several processes may read and extend at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_remat._util import json_values
from compile_remat._util.atomic_write import write_atomically

LOG = logging.getLogger("compile_remat")

SCHEMA = 1


@dataclass(frozen=True)
class NumberFile:
    """Numbers that were measured in one place.  A missing, broken or read-only file is no error: its numbers are measured again.

    Attributes:
        path: Path of the file, which need not exist.
        place: The conditions of the measurement, in words; written into the file for human readers.
    """

    path: Path
    place: str

    def read(self) -> dict[str, int]:
        """Returns all numbers by name; an empty dict if there is no file or if it cannot be read."""
        try:
            document = json_values.parse(self.path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r}")
            numbers: dict[str, int] = document["numbers"]
            if not all(type(number) is int and number >= 0 for number in numbers.values()):
                raise ValueError("a value that is no whole number")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            LOG.warning("%s cannot be read (%s): its numbers are measured again", self.path, error)
            return {}
        return numbers

    def add(self, numbers: Mapping[str, int]) -> None:
        """Add numbers to the file; keep the numbers that other processes wrote meanwhile."""
        document = {"schema": SCHEMA, "place": self.place, "numbers": {**self.read(), **numbers}}
        try:
            write_atomically(self.path, json.dumps(document, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            LOG.warning("%s cannot be written (%s): its numbers hold for this process alone", self.path, error)
