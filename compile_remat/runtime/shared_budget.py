"""One budget for all compiled graphs of a step: who runs, who waits for its backward, and who gets which plan.

Graphs come one after the other: when the first is planned, nothing is known of those that follow, nor how often one of them
will run.  A graph that will not be alone (`_torch_dynamo.company`) therefore holds as little as it can in its first step,
within what the others left.  When that step is over, the order of the forwards is known, each graph has told what
its plans cost (`Offer`), and the fastest choice for all of them within the budget (`together.share`) is compiled for the
next step.  A graph that was planned as if it were alone and then meets others is treated in the same way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from compile_remat._torch.autograd_node import (
    after_backward,
    can_be_differentiated,
    compiled_node,
    keeps_its_graph,
    sequence_number,
)
from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.errors import SharedBudgetError, warn
from compile_remat.passes import Offer
from compile_remat.planning.joint_allocation import Shared, Turn, divide, step_peak_bytes
from compile_remat.planning.request import Fit, Replay, Request, SharedOption
from compile_remat.report import Report

Compiled = Callable[..., Any]

ROUNDS = 4
"""So often plans are chosen for one kind of step, each time knowing more of the code that Inductor makes of them."""

CHANGES = 6
"""So often a graph gets another plan because its steps change; then it keeps what it has."""


class Instance:
    """One forward whose backward has not ended.  Its node in autograd keeps it alive; without that it never ran."""

    def __init__(self, member: Member) -> None:
        self.ledger = member.ledger
        self.held_bytes = member.held_bytes
        self.is_shared = bool(member.offers)
        self.is_open = True

    def close(self) -> None:
        """Called by autograd when the node has run."""
        if not keeps_its_graph():
            self.is_open = False
            self.ledger.backwards += 1


@dataclass(frozen=True)
class Run:
    """One entry of a step's history: a graph, and the parameters that it ran with."""

    member: weakref.ref[Member]
    parameters: tuple[WeakIdRef, ...]


class Ledger:
    """The graphs that share one budget on one device.

    Args:
        budget: In bytes, a fraction of the fastest plans' step, or `min`.
        may_miss: Whether a budget that nothing fits is a warning (`auto`) and not an error.
    """

    def __init__(self, budget: MemoryBudget, *, may_miss: bool) -> None:
        self.budget = budget
        self.may_miss = may_miss
        self.open: list[weakref.ref[Instance]] = []
        self.step: list[Run] = []
        self.backwards = 0
        self.look: Callable[[], MemoryBudget] | None = None  # what `auto` comes to when the optimizer has its state
        self.learned: object = None  # the step that plans were last chosen for; by weak references, as ids are reused

    def held_bytes(self) -> int:
        """What the forwards that wait for their backward hold."""
        self.open = [r for r in self.open if (i := r()) is not None and i.is_open]
        return sum(i.held_bytes for r in self.open if (i := r()) is not None)

    @property
    def is_provisional(self) -> bool:
        """Whether a forward that waits for its backward runs under a plan for a graph that is alone."""
        return any(not i.is_shared for r in self.open if (i := r()) is not None)

    def begin(self, member: Member, args: Sequence[Any]) -> Instance:
        """A forward is about to run: close the last step where that is over, and make room.

        Raises:
            SharedBudgetError: The graphs of the step cannot stay inside the budget.
        """
        held_bytes = self.held_bytes()
        if not self.open:
            if self.backwards:
                self._look_again(member)
                self._learn()
            self.step, self.backwards = [], 0
        else:
            member.is_to_be_alone = False
            if not member.offers and self.budget.kind == "bytes" and member.changes < CHANGES:
                if held_bytes + member.peak_bytes > int(self.budget.value or 0):
                    member.wanted = SharedOption(others_bytes=held_bytes, may_miss=self.is_provisional)
        member.adopt_wanted()
        self.step.append(Run(weakref.ref(member), _parameters(args)))
        instance = Instance(member)
        self.open.append(weakref.ref(instance))
        return instance

    def _look_again(self, member: Member) -> None:
        """The second step begins, and the optimizer has its state: where less is free than was thought, plan once more."""
        look, self.look = self.look, None
        seen = None if look is None else look()
        if seen is None or seen.kind != "bytes" or int(seen.value or 0) >= int(self.budget.value or 0):
            return
        is_alone = len(self.step) == 1 and not member.offers
        if not is_alone:
            self.budget = seen  # `_learn` chooses anew
        elif member.peak_bytes > int(seen.value or 0):
            self.budget, member.is_to_be_alone = seen, True

    def _learn(self) -> None:
        """The step is over: choose for all of its graphs at once; what waited for company in vain is to be alone."""
        runs = [(member, run.parameters) for run in self.step if (member := run.member()) is not None]
        if not runs or len(runs) < len(self.step):
            return
        members = list(dict.fromkeys(member for member, _ in runs))
        if len(runs) == 1:
            members[0].is_to_be_alone |= bool(members[0].offers) and not members[0].had_company
            return
        for member in members:
            member.had_company = True
        if max(member.changes for member in members) >= CHANGES:
            return
        for member in members:
            if not member.offers:
                member.wanted = SharedOption()
        if any(member.wanted is not None for member in members):
            return  # each tells its offers in the next step
        turns = _turns(members, runs)
        key = [run.member for run in self.step], turns, self.budget
        if key != self.learned:
            self.learned = key
            self._settle(members, turns)

    def _settle(self, members: Sequence[Member], turns: Sequence[Turn]) -> None:
        """Choose and compile, and choose again while the code of what was chosen needs more than was predicted.

        Raises:
            SharedBudgetError: The graphs of the step cannot stay inside the budget.
        """
        before = [member.saved for member in members]
        for _ in range(ROUNDS):
            found, limit_bytes = self._choose(members, turns)
            known = [len(member.excess_bytes) for member in members]
            for g, member in enumerate(members):
                member.take(member.offers[found.chosen[g]])
            if [len(member.excess_bytes) for member in members] == known:
                break
        for g, member in enumerate(members):
            if member.saved != before[g]:
                member.changes += 1
                count = sum(turn.graph == g for turn in turns)
                text = _text(count, len(members), found, limit_bytes)
                member.publish(replace(member.report, message="; ".join(filter(None, (member.report.message, text)))))

    def _choose(self, members: Sequence[Member], turns: Sequence[Turn]) -> tuple[Shared, int | None]:
        limit_bytes = self._limit_bytes(members, turns)
        for known_only in (False, True):
            found = divide(turns, [m.corrected_offers(known_only=known_only) for m in members], limit_bytes)
            if limit_bytes is None or found.peak_bytes <= limit_bytes:
                return found, limit_bytes
        assert limit_bytes is not None
        if not self.may_miss:
            raise SharedBudgetError(limit_bytes, found.peak_bytes, num_runs=len(turns))
        warn(
            f"{len(turns)} runs of compiled graphs need {format_bytes(found.peak_bytes)} in a step, which is more than "
            f"{format_bytes(limit_bytes)}; these are their lowest plans"
        )
        return found, limit_bytes

    def _limit_bytes(self, members: Sequence[Member], turns: Sequence[Turn]) -> int | None:
        """The budget of the step; None where the lowest is asked for."""
        if self.budget.kind == "fraction":
            fastest = [min(member.offers, key=lambda offer: offer.time_ns) for member in members]
            return int(float(self.budget.value or 0) * step_peak_bytes(turns, fastest))
        return int(self.budget.value or 0) if self.budget.kind == "bytes" else None


def _turns(members: Sequence[Member], runs: Sequence[tuple[Member, tuple[WeakIdRef, ...]]]) -> list[Turn]:
    """A gradient lies beside the backwards that follow it, and lies there once, however many graphs add to it."""
    index = {member: g for g, member in enumerate(members)}
    seen = set[WeakIdRef]()
    turns = []
    for member, parameters in reversed(runs):
        new = set(parameters) - seen
        seen |= new
        turns.append(Turn(index[member], sum(t.nbytes for ref in new if (t := ref()) is not None)))
    return turns[::-1]


class Member:
    """A compiled graph that shares a budget.

    Attributes:
        is_to_be_alone: Whether it is planned anew before it runs, as a graph that is alone in its step.

    Args:
        compiled: What runs.
        report: Its plan, which is not None; with offers where it was planned for company.
        again: Compiles it under another request, within the ledger's budget as it is now; None where that fails.
        publish: Takes the report of a plan that runs from now on.
    """

    def __init__(
        self,
        ledger: Ledger,
        compiled: Compiled,
        report: Report,
        again: Callable[[Request], tuple[Compiled, Report] | None],
        publish: Callable[[Report], None],
    ) -> None:
        self.ledger = ledger
        self.again, self.publish = again, publish
        self.offers: tuple[Offer, ...] = ()
        self.excess_bytes: dict[tuple[str, ...], int] = {}
        self.made: dict[tuple[str, ...], tuple[Compiled, Report]] = {}
        self.wanted: SharedOption | None = None
        self.is_to_be_alone = False
        self.had_company = False
        self.changes = 0
        self._take_up(compiled, report)

    def _take_up(self, compiled: Compiled, report: Report) -> None:
        plan = report.plan
        assert plan is not None
        self.compiled, self.report, self.saved = compiled, report, plan.saved
        self.made[plan.saved] = compiled, report
        self.held_bytes, self.peak_bytes = plan.held_bytes, plan.peak_bytes
        self.offers = report.offers or self.offers
        if report.scheduled_peak_bytes is not None:
            self.excess_bytes[plan.saved] = max(0, report.scheduled_peak_bytes - plan.peak_bytes)

    def corrected_offers(self, *, known_only: bool) -> list[Offer]:
        """The offers, with what Inductor's code needs beyond them; unless `known_only`, a guess where that is not known."""
        guess = 0 if known_only else max(self.excess_bytes.values(), default=0)
        return [replace(o, peak_bytes=o.peak_bytes + self.excess_bytes.get(o.saved, guess)) for o in self.offers]

    def take(self, plan: Offer) -> None:
        """Run under this plan from now on; `publish` it when it is settled."""
        if plan.saved == self.saved:
            return
        known = self.made.get(plan.saved) or self.again(Replay(plan.saved))
        if known is not None:
            self._take_up(*known)

    def adopt_wanted(self) -> None:
        """Compile what is wanted, if anything."""
        wanted, self.wanted = self.wanted, None
        is_wanted, self.is_to_be_alone = wanted is not None or self.is_to_be_alone, False
        self.changes += is_wanted
        found = self.again(wanted or Fit()) if is_wanted else None
        if found is not None:
            self.offers = ()
            self._take_up(*found)
            self.publish(self.report)

    def __call__(self, *args: Any) -> Any:
        """Run the graph; its backward tells the ledger when it has ended."""
        if not can_be_differentiated(args):
            return self.compiled(*args)
        instance = self.ledger.begin(self, args)
        since = sequence_number()
        outputs = self.compiled(*args)
        node = compiled_node(outputs, since)
        if node is not None:
            node.remat_instance = instance
            after_backward(node, instance.close)
        return outputs


def _parameters(args: Sequence[Any]) -> tuple[WeakIdRef, ...]:
    return tuple(WeakIdRef(a) for a in args if isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf)


def _text(count: int, num_graphs: int, found: Shared, limit_bytes: int | None) -> str:
    times = "once" if count == 1 else f"{count} times"
    others = f" beside {num_graphs - 1} other graph{'s' * (num_graphs > 2)}" if num_graphs > 1 else ""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    return f"runs {times} in a step{others}; predicted peak of the step {format_bytes(found.peak_bytes)}{limit}"
