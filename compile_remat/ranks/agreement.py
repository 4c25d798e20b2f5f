"""The agreement of the ranks on one graph: the same budget for `auto`, the same measured times, and finally the same plan.

Each rank posts the graph that it compiles, and finally its plan.  Ranks wait for each other, so that no rank enters a collective
that another rank, whose graph has no plan, will never reach.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import fx

from compile_remat._torch.ranks.groups import current_frame
from compile_remat._util.units import format_bytes
from compile_remat.errors import RankError, RematError, warn
from compile_remat.ranks.board import PATIENCE, Board, Posts, current_board, named
from compile_remat.ranks.places import Place, graph_name

LOG = logging.getLogger("compile_remat")


TOGETHER, APART = "together", "apart"
"""Outcomes: a difference of plans stops all ranks, or none, since a rank that has gone on alone would hang if another stopped."""


HOST_MEMORY = "host memory"
"""Key of the host memory that ranks may take."""


class Agreement:
    """The compilation of one graph, as a context: a `RematError` that leaves the context is posted to the other ranks.

    Only the first variant of a function waits, see `Place.is_first`.

    Args:
        board: None for a graph in which no other rank takes part: then nothing is posted, and every figure is this process's own.
        place: The place of the graph in the program.
        graph: Name of the graph, see `graph_name`.
        timeout_s: Seconds to wait for a rank that has not begun; 0 waits for none.
    """

    def __init__(self, board: Board | None, place: Place, graph: str, timeout_s: float) -> None:
        self._board, self.place, self.graph = board, place, graph
        self.timeout_s = timeout_s
        self._begun, self._planned = f"begun/{place.name}", f"planned/{place.name}"
        self._has_begun = self._is_concluded = False
        self._host_bytes: int | None = None

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], timeout_s: float) -> Self:
        """Returns the agreement on a Dynamo graph; one without a board if the graph has no backward or there are no other ranks."""
        board = current_board() if _has_backward(example_inputs) else None
        if board is None:
            return cls(None, Place("", is_first=False), "", 0)
        return cls(board, board.places.next(current_frame()), graph_name(gm, example_inputs), timeout_s)

    @property
    def is_alone(self) -> bool:
        """True if no other rank takes part in the graph."""
        return self._board is None

    # -- before the plan ----------------------------------------------------------------------------------------------

    def smallest(self, nbytes: int | None, setting: str) -> int | None:
        """Returns the smallest figure that ranks post at this place; in later variants the last one agreed on, or else `nbytes`.

        Args:
            nbytes: This rank's figure; None if it knows none.
            setting: Key of the figure: device and setting.

        Raises:
            RankError: A rank has failed meanwhile.
        """
        if self._board is None:
            return nbytes
        if not self.place.is_first:
            return self._board.agreed_bytes.get(setting, nbytes)
        self.begin(nbytes)
        found = smallest_of(self._others_begun())
        if found is not None:
            self._board.agreed_bytes[setting] = found
        return found

    def offer_host(self, nbytes: int) -> None:
        """Note the host memory that this rank may take; called before it begins, which tells the others."""
        self._host_bytes = nbytes

    def smallest_host(self) -> int | None:
        """Returns the smallest host memory that ranks offer, as `smallest`; None if no rank offers any."""
        if self._board is None:
            return self._host_bytes
        if not self.place.is_first:
            return self._board.agreed_bytes.get(HOST_MEMORY, self._host_bytes)
        self.begin()
        found = smallest_of(self._others_begun(), HOST_MEMORY)
        if found is not None:
            self._board.agreed_bytes[HOST_MEMORY] = found
        return found

    def from_rank_zero(self, make: Callable[[], Any]) -> Any:
        """Returns rank 0's ``make()`` for this graph, passed on as JSON.

        Returns this rank's own ``make()`` in later variants, and if rank 0 compiles another graph or does not post in time.

        Raises:
            RankError: A rank has failed meanwhile.
        """
        board = self._board
        if board is None or not self.place.is_first:
            return make()
        self.begin()
        key = f"times/{self.place.name}"
        if board.rank == 0:
            made = make()
            board.post(key, made)
            return made
        zero = board.wait(f"{self._begun}/0", self.timeout_s)
        found = None
        if zero is not None and zero["graph"] == self.graph:
            found = board.wait(key, PATIENCE * self.timeout_s)
        return make() if found is None else found

    def begin(self, nbytes: int | None = None) -> None:
        """Announce, once, that this rank compiles the graph.

        Args:
            nbytes: Bytes of `auto` on this rank; None if it was not read.
        """
        if self._board is None or self._has_begun or not self.place.is_first:
            return
        self._has_begun = True
        self._board.announce(self._begun, {"graph": self.graph, "bytes": nbytes, HOST_MEMORY: self._host_bytes})

    def _others_begun(self) -> Posts:
        assert self._board is not None
        return self._board.gather(self._begun, f"did not begin to compile {self.place.name}", self.timeout_s)

    # -- after the plan -----------------------------------------------------------------------------------------------

    def conclude(self, saved: Sequence[str] | None, budget_bytes: int | None, *, from_auto: bool) -> None:
        """Announce this rank's plan, and compare it with those of the other ranks.

        Args:
            saved: Names of the values that the plan saves and recomputes, and what it sends to the host; None if the graph has no
                plan, or its plan is not known.
            budget_bytes: Budget of the plan; None if it is not in bytes.
            from_auto: True if the budget came from `auto`.

        Raises:
            RankError: Ranks have different plans for the same graph, or a rank has failed meanwhile.
        """
        if self._board is None:
            return
        self.begin()
        self._is_concluded = True
        plan = None if saved is None else hashlib.sha256("\n".join(saved).encode()).hexdigest()[:16]
        own = {"graph": self.graph, "plan": plan, "bytes": budget_bytes}
        if not self.place.is_first:
            self._compare_later(own)
            return
        self._board.announce(self._planned, own)
        found, is_certain = self._all_planned()
        others = [rank for rank, post in found.items() if post["graph"] != self.graph]
        if others:
            LOG.info(
                "%s: another graph on %s, of other sizes or another part of the model", self.place.name, named(others)
            )
        same = {rank: post for rank, post in found.items() if post["graph"] == self.graph and post["plan"] is not None}
        if len({post["plan"] for post in same.values()}) < 2:
            return
        text = f"the plans of one graph ({self.place.name}) differ: {_by_plan(same)}"
        is_late = from_auto and len({post["bytes"] for post in same.values()}) > 1
        if not is_late and is_certain and self._decide(TOGETHER) == TOGETHER:
            raise RankError(tuple(sorted(same)), text)
        if self.timeout_s:
            warn(f"{text}; training goes on, because a rank did not wait for the others")

    def _all_planned(self) -> tuple[Posts, bool]:
        """Returns the ranks' posts about their plans, and True if every rank gets the same posts."""
        assert self._board is not None
        what = f"did not say how {self.place.name} is planned"
        found = self._board.gather(self._planned, what, self.timeout_s, begun=self._begun)
        if len(found) == self._board.size or self._decide(APART) == APART:
            return found, len(found) == self._board.size
        return self._board.gather(self._planned, what, self.timeout_s), True  # all ranks have posted by now

    def _decide(self, outcome: str) -> str:
        """Returns the outcome that the first rank posted, so that a difference is an error on all ranks or on none."""
        assert self._board is not None
        decided: str = self._board.first(f"decided/{self.place.name}", outcome)
        return decided

    def _compare_later(self, own: dict[str, Any]) -> None:
        """Compare the plan of a later variant with the first one for the same graph, and log a difference: it is no error."""
        assert self._board is not None
        key = f"later/{self.place.name}/{self.graph}"
        first = self._board.first(key, {**own, "rank": self._board.rank})
        if None not in (own["plan"], first["plan"]) and first["plan"] != own["plan"]:
            plans = _by_plan({self._board.rank: own, first["rank"]: first})
            LOG.info("the plans of a later variant (%s) differ: %s", self.place.name, plans)

    # -- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Post that this rank has failed, or that it compiled the graph without a plan, so that no other rank waits for it."""
        if self._board is None or self._is_concluded:
            return
        if isinstance(error, RematError) and not isinstance(error, RankError):
            self._board.fail(error)
        elif self.place.is_first:
            self.begin()
            self._board.announce(self._planned, {"graph": self.graph, "plan": None, "bytes": None})


def agreed_again(nbytes: int | None, setting: str, timeout_s: float) -> int | None:
    """Returns the smallest figure of all ranks after they read the free memory again; `nbytes` if there are no other ranks.

    Args:
        nbytes: This rank's figure; None if it knows none.
        setting: Key of the figure: device and setting.
        timeout_s: Seconds to wait for a rank that does not read the free memory.
    """
    board = current_board()
    if board is None:
        return nbytes
    key = f"again/{setting}/{next(board.rereads.setdefault(setting, itertools.count()))}"
    board.announce(key, {"bytes": nbytes})
    found = smallest_of(board.gather(key, "did not read the free memory again", timeout_s))
    if found is not None:
        board.agreed_bytes[setting] = found
    return found


def smallest_of(posts: Posts, figure: str = "bytes") -> int | None:
    """Returns the smallest figure of a kind among posts; None if no rank knows one."""
    return min((post[figure] for post in posts.values() if post[figure] is not None), default=None)


def _by_plan(posts: Posts) -> str:
    groups: dict[tuple[str, int | None], list[int]] = {}
    for rank, post in sorted(posts.items()):
        groups.setdefault((post["plan"], post["bytes"]), []).append(rank)
    return "; ".join(
        f"{named(ranks)}: plan {plan}, budget {'none in bytes' if nbytes is None else format_bytes(nbytes)}"
        for (plan, nbytes), ranks in groups.items()
    )


def _has_backward(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in example_inputs)
