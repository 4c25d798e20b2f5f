"""Rows of a benchmark that are stored one by one."""

import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import harness
from benchmarks.common.verdicts import Row


def rows_of_file(path: Path) -> list[Row]:
    """The rows of a file that `--json` wrote."""
    return [Row(**fields) for fields in json.loads(path.read_text())["rows"]]


class RowStore:
    """Rows that are stored one by one, so that a run that was ended goes on where it was.

    Args:
        path: Where they are stored, and taken from; None for nowhere.
    """

    def __init__(self, path: Path | None, head: dict[str, str]) -> None:
        self._path, self._head = path, head
        is_there = path is not None and path.exists()
        self.rows: list[Row] = rows_of_file(path) if path is not None and is_there else []

    def put(self, row: Row) -> Row:
        """Store a row, in place of an older one of the same run."""
        at = next((k for k, known in enumerate(self.rows) if _run_of(known) == _run_of(row)), len(self.rows))
        self.rows[at : at + 1] = [row]
        harness.write_json(self._path, self._head, self.rows)
        return row

    def row(self, model: str, kind: str, setting: str, make: Callable[[], Row], *, is_measured: bool) -> Row:
        """The stored row of a run; made and stored where there is none, or only one without a measured peak."""
        found = next((known for known in self.rows if _run_of(known) == (model, kind, setting)), None)
        is_enough = found is not None and (found.peak_bytes is not None or not is_measured)
        return found if found is not None and is_enough else self.put(make())


def _run_of(row: Row) -> tuple[str, str, str]:
    return row.model, row.kind, row.setting
