"""The planner's request in one attempt to compile a graph.

`Settings` stay the same while a graph is compiled; the request differs from one attempt to the next.  Both are frozen and part
of the cache key.
"""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat.passes import Plan, PlanOption


@dataclass(frozen=True)
class ChosenPlan:
    """A plan for one graph, with the report's facts about it.

    Attributes:
        floor_bytes: The lowest reachable peak; None if it was not computed.
        message: Deviations from the budget or the tags, in words; empty if there are none.
        offers: The menu of plan options of this graph, for a later joint allocation.
        left_bytes: Bytes of the step's budget that the other calls leave to this graph's peak; None if they are not known yet.
    """

    plan: Plan
    floor_bytes: int | None = None
    message: str = ""
    offers: tuple[PlanOption, ...] = ()
    left_bytes: int | None = None


@dataclass(frozen=True)
class Fit:
    """Asks for the fastest plan inside the budget of the settings, or for the plan pinned in `plan_dir`."""


@dataclass(frozen=True)
class FitBelow:
    """Asks for the fastest plan within a target, or for the lowest plan; used if emitted code exceeds the budget or memory ran out.

    Attributes:
        target_bytes: The plan's predicted region peak is at most this.
    """

    target_bytes: int


LOWEST = FitBelow(1)
"""Asks for the lowest plan, whatever the budget."""


@dataclass(frozen=True)
class SharedOption:
    """Asks for one plan option inside a budget that other region calls of the step share, and for the menu in the report.

    Attributes:
        others_bytes: Bytes that earlier regions of the step hold until their backward.
        calls: Calls of this region in one step; 0 if unknown: then a conservative option for the first step is taken.
        gradient_bytes: Bytes of parameter gradients that the backward of each call creates.
        may_miss: True if other regions may hold fewer bytes once the step is known: then exceeding the budget only warns.
        others_plain_bytes: Bytes that the other regions would hold under plain torch.compile, as far as known.
        more_follow: True if Dynamo says that other graphs of the step are still to come.
    """

    others_bytes: int = 0
    calls: int = 0
    gradient_bytes: int = 0
    may_miss: bool = False
    others_plain_bytes: int = 0
    more_follow: bool = False

    @property
    def is_open(self) -> bool:
        """Returns True if other regions may follow in the step: Dynamo says so, or no earlier region holds bytes."""
        return self.more_follow or not self.others_bytes

    @property
    def is_last(self) -> bool:
        """Returns True for the graph after the last graph break: no more graphs follow, and all others were planned for peers."""
        return not self.is_open and not self.may_miss


@dataclass(frozen=True)
class Replay:
    """Asks for exactly this plan.

    Attributes:
        saved: Names of the values that the plan saves.
        again: Names of the values with a second recompute in the backward.
    """

    saved: tuple[str, ...]
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resume:
    """Asks for the incumbent that a search had found at its deadline.  Nothing compiled under this request is cached.

    Attributes:
        interrupted: The request that was being planned; it still holds for other graphs of the compilation (nested regions).
        problem_key: `Problem.key()` of the graph that the incumbent belongs to.
    """

    interrupted: Fit | FitBelow | SharedOption | Replay
    problem_key: str
    incumbent: ChosenPlan


Request = Fit | FitBelow | SharedOption | Replay | Resume


def target_bytes_of(request: Request) -> int | None:
    """Returns the target of a `FitBelow`, interrupted or not; None for the other requests."""
    request = interrupted_by(request)
    return request.target_bytes if isinstance(request, FitBelow) else None


def interrupted_by(request: Request) -> Fit | FitBelow | SharedOption | Replay:
    """Returns the request that a `Resume` interrupted; returns any other request as it is."""
    return request.interrupted if isinstance(request, Resume) else request
