"""Rows of a benchmark that are stored one by one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.common import harness
from benchmarks.common.result_rows import Row

R = TypeVar("R")


def rows_of_file(path: Path) -> list[Row]:
    """The rows of a file that `--json` wrote."""
    return [Row(**fields) for fields in json.loads(path.read_text())["rows"]]


class Store(Generic[R]):
    """Rows that are stored one by one, so that an interrupted run goes on from the last row.

    Args:
        path: File that the rows are read from and written to; None for no file.
        read: Makes a row of its stored fields.
        run_of: Returns the key of a row's run; a new row replaces one with the same key.
    """

    def __init__(
        self,
        path: Path | None,
        head: dict[str, str],
        read: Callable[[dict[str, Any]], R],
        run_of: Callable[[R], object],
    ) -> None:
        self._path, self._head, self._run_of = path, head, run_of
        stored = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
        self.rows: list[R] = [read(fields) for fields in stored]

    def find(self, run: object) -> R | None:
        """The stored row of a run."""
        return next((known for known in self.rows if self._run_of(known) == run), None)

    def put(self, row: R) -> R:
        """Store a row, in place of an older one of the same run."""
        run = self._run_of(row)
        at = next((k for k, known in enumerate(self.rows) if self._run_of(known) == run), len(self.rows))
        self.rows[at : at + 1] = [row]
        harness.write_json(self._path, self._head, self.rows)
        return row


class RowStore(Store[Row]):
    """A store of `Row`s, keyed by model, kind and setting."""

    def __init__(self, path: Path | None, head: dict[str, str]) -> None:
        super().__init__(path, head, lambda fields: Row(**fields), lambda row: (row.model, row.kind, row.setting))

    def row(self, model: str, kind: str, setting: str, make: Callable[[], Row], *, is_measured: bool) -> Row:
        """The stored row of a run; made and stored where there is none, or only one without a measured peak."""
        found = self.find((model, kind, setting))
        is_enough = found is not None and (found.peak_bytes is not None or not is_measured)
        return found if found is not None and is_enough else self.put(make())
