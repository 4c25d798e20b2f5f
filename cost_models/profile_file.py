"""Measured times on disk: one JSON file for each device and version of torch, rewritten after every operator.

The file also lists the operators of each graph, so that a graph whose operators are all known is not traced again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_remat._util import json_values
from compile_remat._util.atomic_write import write_atomically

LOG = logging.getLogger("compile_remat")

SCHEMA = 1


@dataclass(frozen=True)
class ProfileFile:
    """The file of one device under one version of torch.

    Attributes:
        path: Path of the file, which need not exist.
        place: Device and version of torch in words, written into the file for people.
    """

    path: Path
    place: str

    def times_ns(self) -> dict[str, int]:
        """Measured times in ns by signature; empty if the file is missing or cannot be read."""
        return dict(self._read()["times_ns"])

    def signatures_of(self, graph: str) -> tuple[str, ...] | None:
        """The signatures that `note` wrote for a graph; None if there are none."""
        found = self._read()["graphs"].get(graph)
        return None if found is None else tuple(found)

    def add(self, times_ns: Mapping[str, int]) -> None:
        """Add times to the file; times that other processes wrote meanwhile are kept."""
        document = self._read()
        document["times_ns"] |= times_ns
        self._write(document)

    def note(self, graph: str, signatures: Sequence[str]) -> None:
        """Write the signatures of a graph's operators to the file."""
        document = self._read()
        document["graphs"][graph] = sorted(signatures)
        self._write(document)

    def _read(self) -> dict[str, Any]:
        try:
            document = json_values.parse(self.path.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']!r}")
            times, graphs = document["times_ns"], document["graphs"]
            if not all(type(time) is int and time > 0 for time in times.values()) or not isinstance(graphs, dict):
                raise ValueError("a time that is no number of nanoseconds")
            return {"times_ns": times, "graphs": graphs}
        except FileNotFoundError:
            return {"times_ns": {}, "graphs": {}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            LOG.warning("%s cannot be read (%s): its operators are timed again", self.path, error)
            return {"times_ns": {}, "graphs": {}}

    def _write(self, document: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, "place": self.place, **document}, indent=1, sort_keys=True)
        try:
            write_atomically(self.path, text + "\n")
        except OSError as error:
            LOG.warning("%s cannot be written (%s): these times hold for this process alone", self.path, error)
