"""What one attempt to compile a graph asks of the planner.

`Settings` stay the same while a graph is compiled; the request is what differs from one attempt to the next.  Both are frozen
and part of the cache key.
"""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat.passes import Plan, PlanOption


@dataclass(frozen=True)
class ChosenPlan:
    """A plan for one graph, with what the report says about it.

    Attributes:
        floor_bytes: The lowest reachable peak, where it was worked out.
        message: What went otherwise than effective.
        offers: The menu of other plans of this graph, for a later joint allocation.
    """

    plan: Plan
    floor_bytes: int | None = None
    message: str = ""
    offers: tuple[PlanOption, ...] = ()


@dataclass(frozen=True)
class Fit:
    """The fastest plan inside the budget of the settings, or the plan pinned in `plan_dir`."""


@dataclass(frozen=True)
class FitBelow:
    """The fastest plan below a target, or the lowest one.  Asked for when emitted code exceeds the budget, or memory ran out.

    Attributes:
        target_bytes: Predicted region peak to stay at or below.
    """

    target_bytes: int


LOWEST = FitBelow(1)
"""The lowest plan, whatever the budget."""


@dataclass(frozen=True)
class SharedOption:
    """One plan option inside a budget that other region calls of the step share, and the menu of options in the report.

    Attributes:
        others_bytes: Bytes that earlier regions of the step hold until their backward.
        calls: Calls of this region in one step; 0 where that is not known, and the option that holds least is taken.
        gradient_bytes: Bytes of parameter gradients that the backward of each call creates.
        may_miss: Whether the other regions hold more than they will once the step is known: exceeding the budget is then a
            warning.
        others_plain_bytes: What the others would hold under plain torch.compile, as far as it is known.
        more_follow: Whether Dynamo says that other graphs of the step are still to come.
    """

    others_bytes: int = 0
    calls: int = 0
    gradient_bytes: int = 0
    may_miss: bool = False
    others_plain_bytes: int = 0
    more_follow: bool = False

    @property
    def is_open(self) -> bool:
        """Whether regions may follow, for all that is known."""
        return self.more_follow or not self.others_bytes

    @property
    def is_last(self) -> bool:
        """Whether the others were planned for peers, and Dynamo says of no more: the graph behind the last graph break."""
        return not self.is_open and not self.may_miss


@dataclass(frozen=True)
class Replay:
    """Exactly this plan.

    Attributes:
        saved: Names of the values it saves.
        again: Names of the values it computes a second time in the backward.
    """

    saved: tuple[str, ...]
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resume:
    """The incumbent that a deadline left.  Nothing compiled under this request is cached.

    Attributes:
        interrupted: The request that was being planned; other graphs of the compilation (nested regions) still follow it.
        problem_key: `Problem.key()` of the graph that the incumbent belongs to.
    """

    interrupted: Fit | FitBelow | SharedOption | Replay
    problem_key: str
    incumbent: ChosenPlan


Request = Fit | FitBelow | SharedOption | Replay | Resume


def target_bytes_of(request: Request) -> int | None:
    """The target of a `FitBelow`, interrupted or not; None for the other requests."""
    request = interrupted_by(request)
    return request.target_bytes if isinstance(request, FitBelow) else None


def interrupted_by(request: Request) -> Fit | FitBelow | SharedOption | Replay:
    """The request that a `Resume` goes on with; any other request is returned as it is."""
    return request.interrupted if isinstance(request, Resume) else request
