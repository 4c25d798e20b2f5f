"""What ranks tell each other through the store of the default process group: posts that stay, and waits that end.

Each rank posts under its own key and counts itself; the one that comes last puts all posts under one key, so that N ranks need
some N operations of the store and not N squared.  A wait looks again and again and holds no lock of the store, which other threads
of torch use as well.  A rank that did not post within a wait is silent from then on: it is looked for, and not waited for again.
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
"""A rank that has begun is waited for so many times longer than one that has not: planning and compiling take their time."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.1
"""Between two looks at the store."""

Posts = dict[int, Any]
"""What was posted under a key, by rank."""


class Board:
    """The store of one process group, as one of its ranks sees it.

    Args:
        store: A ``torch.distributed.Store``.
        rank: This process.
        size: How many ranks there are.

    Attributes:
        agreed_bytes: What `auto` came to the last time that the ranks agreed, by device and setting.
        silent: Ranks that did not post within a wait.
        is_lost: Whether the store has stopped to answer.
        places: Counts the graphs of this process, see `ranks.places`.
        rereads: Counts how often `auto` was read again, by device and setting.
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
        """Put a value of JSON under a key."""
        self._ask(lambda: self._posts.set(key, json.dumps(value)), None)

    def read(self, key: str) -> Any:
        """What is under a key; None where nothing is."""
        return self._ask(lambda: json.loads(self._posts.get(key)) if self._posts.check([key]) else None, None)

    def first(self, key: str, value: Any) -> Any:
        """What is under a key that this value is put under if it is the first one."""
        return self._ask(lambda: json.loads(self._posts.compare_set(key, "", json.dumps(value))), value)

    def _ask(self, call: Callable[[], T], default: T) -> T:
        """What the store says; `default`, with a warning, from the moment on that it does not answer any more."""
        if self.is_lost:
            return default
        try:
            return call()
        except torch.distributed.DistError as error:
            self.is_lost, self.silent = True, set(range(self.size)) - {self.rank}
            warn(f"the store of the process group does not answer ({error}): this rank plans without the others")
            return default

    def wait(self, key: str, timeout_s: float) -> Any:
        """What is under a key as soon as something is; None where nothing comes in time.

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
        """Put this rank's value beside those of the others."""
        self.post(f"{key}/{self.rank}", value)
        if self._ask(lambda: self._posts.add(f"{key}/count", 1), 0) == self.size:
            self.post(f"{key}/all", [self.read(f"{key}/{rank}") for rank in range(self.size)])

    def gather(self, key: str, what: str, timeout_s: float, begun: str = "") -> Posts:
        """The values that all ranks have announced under a key, this one's among them; those of silent ranks may be missing.

        Args:
            what: What is waited for, in a sentence that begins with the ranks.
            timeout_s: How long a rank is waited for that has not begun; 0: no rank is waited for.
            begun: The key under which ranks announce that they have begun, which makes the wait longer.

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
        """Tell the others that this rank will not take part in what they do next."""
        number = self._ask(lambda: self._posts.add("failures", 1), 0)
        self.post(f"failure/{number}", {"rank": self.rank, "error": type(error).__name__, "text": str(error)})

    def raise_failure(self) -> None:
        """Raise for the next failure that another rank has posted, once for each.

        Raises:
            RankError: There is one.
        """
        while (found := self.read(f"failure/{self._num_failures + 1}")) is not None:
            self._num_failures += 1
            if found["rank"] != self.rank:
                raise RankError(
                    (found["rank"],), f"{named([found['rank']])} has failed with {found['error']}", found["text"]
                )


class _Pause:
    """Sleeps between two looks, longer each time; False when the time is up."""

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
    """Ranks in words: `rank 1`, `ranks 0, 2 and 3`."""
    texts = [str(rank) for rank in sorted(ranks)]
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


_BOARDS: list[Board] = []
"""That of the process group that is there, or of the last one that was."""


def current_board() -> Board | None:
    """The board of the default process group; None where this process trains alone."""
    store = default_store()
    if store is None:
        return None
    if not _BOARDS or _BOARDS[0].store is not store:
        _BOARDS[:] = [Board(store, own_rank(), num_ranks())]
    return _BOARDS[0]


def note_failure(error: BaseException) -> None:
    """Tell the other ranks, where there are any, that this one will not take part in what they do next."""
    board = current_board()
    if board is not None:
        board.fail(error)
