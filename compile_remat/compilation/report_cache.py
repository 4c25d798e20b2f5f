"""Keeps reports for cache hits: torch keeps the compiled graphs, and a file beside torch's cache keeps their reports.

On a hit of AOTAutograd's cache no partitioner is called.  The file of a compilation is named by everything that torch's
key and our plan depend on, the partitioner's `uuid` among it, so another budget, device or version finds no file.  A
graph that comes from a remote cache alone has no file either, and runs without a report.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx

from compile_remat._torch import cache_key_text
from compile_remat._util import json_values
from compile_remat._util.atomic_write import write_atomically
from compile_remat.pages.figures import PictureSource
from compile_remat.passes import Assumptions
from compile_remat.passes.pictures.plan_pictures import StoredPictures
from compile_remat.report import Report

LOG = logging.getLogger("compile_remat")

SCHEMA = 11


def text_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Text of a Dynamo graph, its inputs and torch's settings, as in torch's key; None if the text cannot be made.

    To be called before Inductor compiles the graph, as Inductor rewrites some graphs in place.
    """
    try:
        return cache_key_text.compilation_text(gm, example_inputs)
    except Exception:  # a graph may hold anything, and its text must not stop a training run
        LOG.warning(
            "a graph has no name for its stored report: a process that finds it in torch's cache has no report of it",
            exc_info=True,
        )
        return None


def path_of(graph_text: Callable[[], str | None], uuid: object, options: Mapping[str, Any]) -> Path | None:
    """The file of one compilation; None where torch caches no partitions, so that our partitioner always runs.

    Args:
        graph_text: Returns the result of `text_of` for the graph; there is no file if that is None.
    """
    if not cache_key_text.partitions_are_cached(options) or (graph := graph_text()) is None:
        return None
    text = "\n".join([graph, repr(uuid), repr(sorted(options.items()))])
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    return Path(cache_key_text.inductor_cache_folder()) / "remat" / f"{name}.json"


@dataclass(frozen=True)
class Kept:
    """Content of the file of one compilation.

    Attributes:
        reports: The reports of the compilation; empty if no partition was made.
        next_bytes: If another plan was taken: the target of its `FitBelow`, or 0 if it was made for the budget itself; None if
            this plan was taken.
        next_assumed: The assumptions of that other plan, as `Assumptions.to_text` writes them.
        written: Positions of the inputs that the graph writes into; None if unknown.
    """

    reports: tuple[Report, ...] = ()
    next_bytes: int | None = None
    next_assumed: str = ""
    written: tuple[int, ...] | None = None


def store(path: Path, kept: Kept) -> None:
    """Write the result of a compilation.  A folder that cannot be written costs a report, not the training run."""
    reports = [json.loads(report.to_json()) for report in kept.reports]
    pictures = [None if (source := _pictures_of(report)) is None else source.to_text() for report in kept.reports]
    document = {"schema": SCHEMA, **asdict(kept), "reports": reports, "pictures": pictures}
    try:
        write_atomically(path, json.dumps(document, indent=1))
    except OSError as error:
        LOG.warning(
            "%s cannot be written (%s): a process that finds the graph in torch's cache has no report",
            path,
            error,
        )


def _pictures_of(report: Report) -> PictureSource | None:
    return None if report.plan is None else report.plan.pictures


def _with_pictures(report: Report, text: object) -> Report:
    """The report with the stored source of its plan's pictures, which is not read before a picture is drawn."""
    if report.plan is None or not isinstance(text, str):
        return report
    return replace(report, plan=replace(report.plan, pictures=StoredPictures(text)))


def recall(path: Path) -> Kept:
    """The content that `store` wrote, its reports marked as `from_cache`; empty if the file is missing or damaged."""
    try:
        document = json_values.parse(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ValueError(f"no file of schema {SCHEMA}")
        reports, pictures = document.pop("reports", None), document.pop("pictures", None)
        if not isinstance(reports, list) or not isinstance(pictures, list) or len(pictures) != len(reports):
            raise ValueError("it has no list of reports")
        found = tuple(
            _with_pictures(replace(Report.from_object(entry), from_cache=True), text)
            for entry, text in zip(reports, pictures, strict=True)
        )
        kept = replace(json_values.read_as(Kept, document), reports=found)
        if kept.next_bytes is not None:
            Assumptions.from_text(kept.next_assumed)
        return kept
    except FileNotFoundError:
        return Kept()
    except (OSError, ValueError) as error:
        LOG.warning("%s cannot be read (%s): this graph comes from torch's cache without its report", path, error)
        return Kept()
