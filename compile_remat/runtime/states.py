"""The two state machines of the runtime, as tables from which the code reads its transitions; `help` shows them."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

PLAN_TABLE = """
    state             event            next state        what happened
    exclusive         peers seen       replan shared     a step ended in which other region calls ran
    exclusive         no room          replan shared     the calls in flight leave less than the plan's peak
    exclusive         budget fell      replan exclusive  `auto` was read again and is below the plan's peak
    expecting         peers seen       offering          a step ended in which other region calls ran
    expecting         no peer seen     replan exclusive  a step ended in which no other region call ran
    replan exclusive  peers in flight  expecting         its next call began beside others: the plan stays
    replan exclusive  replanned        exclusive         a plan for the whole budget was compiled
    replan exclusive  failed           frozen            no other plan compiles
    replan shared     replanned        offering          a conservative plan was compiled, with a menu
    replan shared     failed           frozen            no other plan compiles
    offering          allocated        shared            the joint allocation chose a plan of the menu
    shared            allocated        shared            the joint allocation chose again, as the step has changed
    shared            changed often    frozen            the plan was changed `CHANGES` times
"""
"""Transitions of a region's plan, which changes only when a region call begins.  A new region is exclusive, or expecting if its
peers were known when it was compiled.  Recovery from out of memory replaces the plan in any state and leaves the state as it is."""

CALL_TABLE = """
    state              event        next state         what happened
    forward            retried      forward            out of memory; the forward runs again under a lower plan
    forward            returned     awaiting backward  an output can be differentiated
    forward            no backward  abandoned          the forward failed, or no output can be differentiated
    awaiting backward  retried      awaiting backward  out of memory; forward and backward run again under a lower plan
    awaiting backward  retained     awaiting backward  a backward has ended that was asked to ``retain_graph``
    awaiting backward  released     done               a backward has ended and freed what was saved
    awaiting backward  dropped      abandoned          autograd has freed the node: there will be no backward
"""
"""Transitions of one region call, from its forward to the end of its backward."""

__doc__ = f"{__doc__}\n\nThe plan of a region:\n{PLAN_TABLE}\nA region call:\n{CALL_TABLE}"


class PlanState(StrEnum):
    """The origin of a region's plan, and how the plan is to be replaced."""

    EXCLUSIVE = "exclusive"
    EXPECTING = "expecting"
    REPLAN_EXCLUSIVE = "replan exclusive"
    REPLAN_SHARED = "replan shared"
    OFFERING = "offering"
    SHARED = "shared"
    FROZEN = "frozen"


class PlanEvent(StrEnum):
    """Events that change the `PlanState` of a region."""

    PEERS_SEEN = "peers seen"
    NO_PEER_SEEN = "no peer seen"
    NO_ROOM = "no room"
    BUDGET_FELL = "budget fell"
    PEERS_IN_FLIGHT = "peers in flight"
    REPLANNED = "replanned"
    FAILED = "failed"
    ALLOCATED = "allocated"
    CHANGED_OFTEN = "changed often"


class CallState(StrEnum):
    """The progress of a region call."""

    FORWARD = "forward"
    AWAITING_BACKWARD = "awaiting backward"
    DONE = "done"
    ABANDONED = "abandoned"


class CallEvent(StrEnum):
    """Events that change the `CallState` of a region call."""

    RETRIED = "retried"
    RETURNED = "returned"
    NO_BACKWARD = "no backward"
    RETAINED = "retained"
    RELEASED = "released"
    DROPPED = "dropped"


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


def _parsed(table: str, states: type[S], events: type[E]) -> dict[tuple[S, E], S]:
    """Returns the next state by state and event, read from a table whose columns are at least two spaces apart."""
    rows = [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in table.splitlines() if row.strip()]
    return {(states(state), events(event)): states(after) for state, event, after, _ in rows[1:]}


PLAN_TRANSITIONS = _parsed(PLAN_TABLE, PlanState, PlanEvent)
CALL_TRANSITIONS = _parsed(CALL_TABLE, CallState, CallEvent)
