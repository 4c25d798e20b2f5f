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
from dataclasses import dataclass
from typing import Any

import torch

from compile_remat._torch_autograd import compiled_node, keeps_its_graph, sequence_number
from compile_remat.budget import MemoryBudget
from compile_remat.check import can_be_differentiated
from compile_remat.choice import Share
from compile_remat.errors import SharedBudgetError, warn
from compile_remat.passes import Offer
from compile_remat.report import Report
from compile_remat.together import Shared, Turn, divide, step_peak_bytes
from compile_remat.units import format_bytes

Compiled = Callable[..., Any]

CHANGES = 6
"""So often the graphs of one budget get other plans, whatever happens; then they keep those that they have."""


class Instance:
    """One forward whose backward has not ended.  Its node in autograd keeps it alive; without that it never ran."""

    def __init__(self, member: Member) -> None:
        self.ledger = member.ledger
        self.held_bytes = member.held_bytes
        self.is_open = True

    def close(self, *_: object) -> None:
        """Called by autograd when the node has run."""
        if not keeps_its_graph():
            self.is_open = False
            self.ledger.backwards += 1


@dataclass(frozen=True)
class Run:
    """One entry of a step's history: a graph, and the parameters that it ran with by identity and bytes."""

    member: weakref.ref[Member]
    parameters: tuple[tuple[int, int], ...]


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
        self.changes = 0
        self.learned: object = None

    def held_bytes(self) -> int:
        """What the forwards that wait for their backward hold."""
        self.open = [r for r in self.open if (i := r()) is not None and i.is_open]
        return sum(i.held_bytes for r in self.open if (i := r()) is not None)

    def begin(self, member: Member, args: Sequence[Any]) -> Instance:
        """A forward is about to run: close the last step where that is over, and make room.

        Raises:
            SharedBudgetError: The graphs of the step cannot stay inside the budget.
        """
        held_bytes = self.held_bytes()
        if not self.open:
            if self.backwards:
                self._learn()
            self.step, self.backwards = [], 0
        elif not member.offers and self.budget.kind == "bytes":
            if held_bytes + member.peak_bytes > int(self.budget.value or 0):
                member.wanted = Share(others_bytes=held_bytes)
        member.adopt()
        self.step.append(Run(weakref.ref(member), _parameters(args)))
        instance = Instance(member)
        self.open.append(weakref.ref(instance))
        return instance

    def _learn(self) -> None:
        """The step is over: choose for all of its graphs at once, where one of them was not alone in it."""
        runs = [(member, run.parameters) for run in self.step if (member := run.member()) is not None]
        if len(runs) < 2 or len(runs) < len(self.step) or self.changes >= CHANGES:
            return
        members = list(dict.fromkeys(member for member, _ in runs))
        for member in members:
            if not member.offers:
                member.wanted = Share()
        if any(member.wanted is not None for member in members):
            self.changes += 1
            return  # each tells its offers in the next step
        key = [(id(m), p) for m, p in runs], [m.excess_bytes.copy() for m in members], self.budget
        if key == self.learned:
            return
        self.learned = key
        found, limit_bytes = self._choose(members, _turns(members, runs))
        changed = False
        for g, member in enumerate(members):
            count = sum(m is member for m, _ in runs)
            note = _text(count, len(members), found, limit_bytes)
            changed |= member.take(member.offers[found.chosen[g]], note)
        self.changes += changed

    def _choose(self, members: Sequence[Member], turns: Sequence[Turn]) -> tuple[Shared, int | None]:
        offers = [member.corrected_offers() for member in members]
        limit_bytes = int(self.budget.value or 0) if self.budget.kind == "bytes" else None
        if self.budget.kind == "fraction":
            fastest = [min(own, key=lambda offer: offer.time_ns) for own in offers]
            limit_bytes = int(float(self.budget.value or 0) * step_peak_bytes(turns, fastest))
        found = divide(turns, offers, limit_bytes)
        if limit_bytes is not None and found.peak_bytes > limit_bytes:
            if not self.may_miss:
                raise SharedBudgetError(limit_bytes, found.peak_bytes, num_runs=len(turns))
            warn(
                f"{len(turns)} runs of compiled graphs need {format_bytes(found.peak_bytes)} in a step, which is more than "
                f"{format_bytes(limit_bytes)}; these are their lowest plans"
            )
        return found, limit_bytes


def _turns(members: Sequence[Member], runs: Sequence[tuple[Member, tuple[tuple[int, int], ...]]]) -> list[Turn]:
    """A gradient lies beside the backwards that follow it, and lies there once, however many graphs add to it."""
    index = {member: g for g, member in enumerate(members)}
    seen = set[int]()
    turns = []
    for member, parameters in reversed(runs):
        new = {key: nbytes for key, nbytes in parameters if key not in seen}
        seen.update(new)
        turns.append(Turn(index[member], sum(new.values())))
    return turns[::-1]


class Member:
    """A compiled graph that shares a budget.

    Args:
        compiled: What runs.
        report: Its plan, which is not None; with offers where it was planned for company.
        again: Compiles it under another share; None where that is not possible.
    """

    def __init__(
        self,
        ledger: Ledger,
        compiled: Compiled,
        report: Report,
        again: Callable[[Share, str], tuple[Compiled, Report] | None] | None,
    ) -> None:
        self.ledger = ledger
        self.again = again
        self.offers: tuple[Offer, ...] = ()
        self.excess_bytes: dict[tuple[str, ...], int] = {}
        self.wanted: Share | None = None
        self.note = ""
        self._take_up(compiled, report)

    def _take_up(self, compiled: Compiled, report: Report) -> None:
        plan = report.plan
        assert plan is not None
        self.compiled, self.saved = compiled, plan.saved
        self.held_bytes, self.peak_bytes = plan.held_bytes, plan.peak_bytes
        self.offers = report.offers or self.offers
        if report.scheduled_peak_bytes is not None:
            self.excess_bytes[plan.saved] = max(0, report.scheduled_peak_bytes - plan.peak_bytes)

    def corrected_offers(self) -> list[Offer]:
        """The offers, with what Inductor's code needs beyond them where that is known."""
        return [
            Offer(
                o.saved, o.held_bytes, o.forward_peak_bytes, o.peak_bytes + self.excess_bytes.get(o.saved, 0), o.time_ns
            )
            for o in self.offers
        ]

    def take(self, plan: Offer, note: str) -> bool:
        """Run under this plan from the next call on; returns whether it is another one."""
        self.note = note
        self.wanted = None if plan.saved == self.saved else Share(saved=plan.saved)
        return self.wanted is not None

    def adopt(self) -> None:
        """Compile the plan that is wanted, if any."""
        wanted, self.wanted = self.wanted, None
        if wanted is None or self.again is None:
            return
        found = self.again(wanted, self.note)
        if found is not None:
            self._take_up(*found)

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
            node.register_hook(instance.close)
        return outputs


def _parameters(args: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    leaves = (a for a in args if isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf)
    return tuple((id(a), a.nbytes) for a in leaves)


def _text(count: int, num_graphs: int, found: Shared, limit_bytes: int | None) -> str:
    times = "once" if count == 1 else f"{count} times"
    others = f" beside {num_graphs - 1} other graph{'s' * (num_graphs > 2)}" if num_graphs > 1 else ""
    limit = "" if limit_bytes is None else f" of {format_bytes(limit_bytes)}"
    return f"runs {times} in a step{others}; predicted peak of the step {format_bytes(found.peak_bytes)}{limit}"
