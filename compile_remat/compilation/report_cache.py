"""What a cache hit must find again: torch keeps the compiled graphs, and a file beside its cache keeps their reports.

On a hit of AOTAutograd's cache no partitioner is called.  The file of a compilation is named by everything that torch's
key and our plan depend on, the partitioner's `uuid` among it, so another budget, device or version finds no file.  What
comes from a remote cache alone has none either: it runs as compiled, without a report.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import fx

from compile_remat._torch import cache_key_text
from compile_remat._util.atomic_write import write_atomically
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

SCHEMA = 6


def path_of(gm: fx.GraphModule, example_inputs: Sequence[Any], uuid: object, options: Mapping[str, Any]) -> Path | None:
    """The file of one compilation; None where torch caches no partitions, so that our partitioner always runs."""
    if not cache_key_text.partitions_are_cached(options):
        return None
    try:
        graph = cache_key_text.compilation_text(gm, example_inputs)
    except Exception:  # made of whatever a graph holds: it must not stop a training run
        LOG.warning(
            "a graph has no name for its side file: a process that hits the cache will have no report", exc_info=True
        )
        return None
    text = "\n".join([graph, repr(uuid), repr(sorted(options.items()))])
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(cache_key_text.inductor_cache_folder()) / "remat" / f"{name}.json"


def store(
    path: Path,
    reports: Sequence[Report],
    tightened_bytes: int | None = None,
    *,
    written: Collection[int] | None = None,
) -> None:
    """Keep the reports of a compilation, or that it was given up for one that plans for `tightened_bytes`.

    `written` are the positions of the inputs that the graph writes into, where these are known.

    A folder that cannot be written costs a report, not the training run.
    """
    entries = [json.loads(report.to_json()) for report in reports]
    document = {
        "schema": SCHEMA,
        "reports": entries,
        "tightened_bytes": tightened_bytes,
        "written": None if written is None else sorted(written),
    }
    try:
        write_atomically(path, json.dumps(document, indent=1))
    except OSError as error:
        LOG.warning("%s cannot be written (%s): a process that hits the cache will have no report", path, error)


def recall(path: Path) -> list[Report]:
    """The reports that `store` kept, marked as `from_cache`; none where no partition was made."""
    try:
        reports = [Report.from_json(json.dumps(entry)) for entry in _read(path).get("reports", ())]
    except (ValueError, KeyError, TypeError) as error:
        LOG.warning("%s cannot be read (%s): this graph comes from torch's cache without its report", path, error)
        return []
    return [replace(report, from_cache=True) for report in reports]


def recall_tightened(path: Path) -> int | None:
    """The bytes that an earlier process planned for in the end, where its first plan turned out too large."""
    found = _read(path).get("tightened_bytes")
    return found if isinstance(found, int) else None


def recall_written(path: Path) -> frozenset[int] | None:
    """Positions of the inputs that the graph writes into; None where they are not known."""
    found = _read(path).get("written")
    return frozenset(found) if isinstance(found, list) else None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        return dict(document)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("%s cannot be read (%s): this graph comes from torch's cache without its report", path, error)
        return {}
