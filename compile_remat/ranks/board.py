"""Messages of ranks through the store of the default process group: posts that stay, and waits that end.

Each rank posts under its own key and increments a counter.  The last one puts all posts under one key, so that N ranks need about
N operations of the store and not N squared.  A wait polls and holds no lock of the store, which other threads of torch use too.
A rank that did not post within a wait counts as silent from then on: its posts are still read, but no wait is for them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from compile_remat._torch.ranks.groups import default_store, own_rank, prefixed
from compile_remat._torch.ranks.groups import num_ranks as num_ranks
from compile_remat.errors import RankError, warn
from compile_remat.ranks.places import Places

T = TypeVar("T")

PREFIX = "compile_remat"

PATIENCE = 10
"""Factor by which the wait for a rank that has begun is longer than for one that has not: planning and compiling take time."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.1
"""Pauses between two polls of the store, in seconds."""

Posts = dict[int, Any]
"""The values posted under a key, by rank."""


class Board:
    """The store of one process group, as one of its ranks sees it.

    Args:
        store: A ``torch.distributed.Store``.
        rank: Rank of this process.
        size: Number of ranks.

    Attributes:
        agreed_bytes: Bytes of `auto` when the ranks last agreed, by device and setting.
        silent: Ranks that did not post within a wait.
        is_lost: True if the store does not answer any more.
        places: Counters of the graphs of this process, see `ranks.places`.
        rereads: Counters of the times that `auto` was read again, by device and setting.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.agreed_bytes: dict[str, int] = {}
        self.silent: set[int] = set()
        self.is_lost = False
        self.places = Places()
        self.rereads: dict[str, itertools.count[int]] = {}
        self._posts = prefixed(store, PREFIX)
        self._num_failures = 0

    # -- single posts -------------------------------------------------------------------------------------------------

    def post(self, key: str, value: Any) -> None:
        """Store a value under a key, as JSON."""
        self._ask(lambda: self._posts.set(key, json.dumps(value)), None)

    def read(self, key: str) -> Any:
        """Returns the value under a key; None if there is none."""
        return self._ask(lambda: json.loads(self._posts.get(key)) if self._posts.check([key]) else None, None)

    def first(self, key: str, value: Any) -> Any:
        """Sets `key` to `value` if absent; returns the stored value, or `value` if the store does not answer."""
        return self._ask(lambda: json.loads(self._posts.compare_set(key, "", json.dumps(value))), value)

    def _ask(self, call: Callable[[], T], default: T) -> T:
        """Returns ``call()``; returns `default`, after one warning, once the store does not answer any more."""
        if self.is_lost:
            return default
        try:
            return call()
        except torch.distributed.DistError as error:
            self.is_lost, self.silent = True, set(range(self.size)) - {self.rank}
            warn(f"the store of the process group does not answer ({error}): this rank plans without the others")
            return default

    def wait(self, key: str, timeout_s: float) -> Any:
        """Wait for a value under a key and return it; None if no value comes in time.

        Raises:
            RankError: A rank has failed meanwhile.
        """
        pause = _Pause(timeout_s)
        while (found := self.read(key)) is None:
            self.raise_failure()
            if not pause():
                return None
        return found

    # -- posts of all ranks -------------------------------------------------------------------------------------------

    def announce(self, key: str, value: Any) -> None:
        """Post this rank's value; the last rank also posts the values of all."""
        self.post(f"{key}/{self.rank}", value)
        if self._ask(lambda: self._posts.add(f"{key}/count", 1), 0) == self.size:
            self.post(f"{key}/all", [self.read(f"{key}/{rank}") for rank in range(self.size)])

    def gather(self, key: str, what: str, timeout_s: float, begun: str = "") -> Posts:
        """Returns the values that all ranks, this one included, announce under a key; those of late or silent ranks may be missing.

        Args:
            what: Predicate of the warning about late ranks, such as "did not begin"; the ranks are its subject.
            timeout_s: Seconds to wait for a rank that has not begun; 0 waits for none.
            begun: The key under which ranks announce that they have begun, for which the wait is longer.

        Raises:
            RankError: A rank has failed meanwhile.
        """
        pause = _Pause(timeout_s)
        awaited = set(range(self.size)) - self.silent - {self.rank}
        has_begun = False
        while True:
            everyone = self.read(f"{key}/all")
            if everyone is not None:
                return dict(enumerate(everyone))
            self.raise_failure()
            if self.silent and awaited <= self._posted(key, awaited):
                break
            if pause():
                continue
            awaited -= self._posted(key, awaited)
            late = self._posted(begun, awaited) if begun and not has_begun else set[int]()
            self._give_up(awaited - late, what, timeout_s)
            if not late or not timeout_s:
                break
            awaited, has_begun = late, True
            pause = _Pause((PATIENCE - 1) * timeout_s)
        found = {rank: self.read(f"{key}/{rank}") for rank in range(self.size)}
        return {rank: value for rank, value in found.items() if value is not None}

    def _posted(self, key: str, ranks: Collection[int]) -> set[int]:
        return {rank for rank in ranks if self.read(f"{key}/{rank}") is not None}

    def _give_up(self, ranks: Collection[int], what: str, timeout_s: float) -> None:
        if not ranks or not timeout_s:
            return
        self.silent |= set(ranks)
        warn(
            f"{named(ranks)} {what} in {timeout_s:g} s (rank_timeout); this rank goes on, and does not wait for "
            f"{'it' if len(ranks) == 1 else 'them'} again"
        )

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Post that this rank has failed and takes part in nothing further."""
        number = self._ask(lambda: self._posts.add("failures", 1), 0)
        self.post(f"failure/{number}", {"rank": self.rank, "error": type(error).__name__, "text": str(error)})

    def raise_failure(self) -> None:
        """Raise for the next failure that another rank has posted; each failure raises once.

        Raises:
            RankError: Another rank has posted a failure.
        """
        while (found := self.read(f"failure/{self._num_failures + 1}")) is not None:
            self._num_failures += 1
            if found["rank"] != self.rank:
                raise RankError(
                    (found["rank"],), f"{named([found['rank']])} has failed with {found['error']}", found["text"]
                )


class _Pause:
    """Sleeps between two polls, longer each time; a call returns False when the time is up."""

    def __init__(self, timeout_s: float) -> None:
        self.end_s = time.monotonic() + timeout_s
        self.pause_s = SHORTEST_PAUSE_S

    def __call__(self) -> bool:
        left_s = self.end_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(self.pause_s, left_s))
        self.pause_s = min(LONGEST_PAUSE_S, 1.5 * self.pause_s)
        return True


def named(ranks: Collection[int]) -> str:
    """Returns ranks in words: `rank 1`, `ranks 0, 2 and 3`."""
    texts = [str(rank) for rank in sorted(ranks)]
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


_BOARDS: list[Board] = []
"""The board of the current process group, or of the last one."""


def current_board() -> Board | None:
    """Returns the board of the default process group; None if this process trains alone."""
    store = default_store()
    if store is None:
        return None
    if not _BOARDS or _BOARDS[0].store is not store:
        _BOARDS[:] = [Board(store, own_rank(), num_ranks())]
    return _BOARDS[0]


def note_failure(error: BaseException) -> None:
    """Post to the other ranks, if there are any, that this one has failed and takes part in nothing further."""
    board = current_board()
    if board is not None:
        board.fail(error)
