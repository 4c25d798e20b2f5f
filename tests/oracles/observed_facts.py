"""Plans by name, and the facts of a code generator that does what the simulator expects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.candidate_plan import Candidate, may_run_again
from compile_remat.passes.memory.on_host import live_on_device
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.memory.step_curve import curve_of
from compile_remat.passes.problem.facts import GraphFacts, KernelFacts, RegionFacts
from compile_remat.passes.problem.plan import Offloaded, Plan, Status
from compile_remat.passes.problem.problem import Problem


@dataclass(frozen=True)
class Chosen:
    """A plan of a problem, by names."""

    saved: tuple[str, ...]
    again: tuple[str, ...] = ()
    offloaded: tuple[Offloaded, ...] = ()

    @property
    def plan(self) -> Plan:
        figures = (0,) * 7
        return Plan("", Status.FEASIBLE, None, self.saved, (), *figures, again=self.again, offloaded=self.offloaded)


def any_plan(rng: random.Random, problem: Problem) -> Chosen:
    saved = tuple(v.name for v in problem.values if v.is_saveable and rng.random() < 0.4)
    again = tuple(v.name for v in problem.values if may_run_again(v) and rng.random() < 0.2)
    return Chosen(saved, again, any_copies(rng, candidate_of(problem, saved, again)))


def any_copies(rng: random.Random, found: Candidate) -> tuple[Offloaded, ...]:
    """Some of a plan's saved values, each released behind its last reader and fetched before its first one."""
    curve = curve_of(found)
    copies = []
    for each in curve.movable:
        if rng.random() < 0.4:
            releases = [name for name in curve.places[each.last_read + 1 :] if name]
            fetches = curve.slots[: each.first_read + 1]
            copies.append(Offloaded(each.name, rng.choice([*releases, ""]), rng.choice([*fetches, ""])))
    return tuple(copies)


def facts_as_simulated(found: Candidate, offloaded: Sequence[Offloaded] = ()) -> RegionFacts:
    """The facts of a code generator that does what the simulator expects."""
    simulator, batch = found.simulator, found.batch
    values, steps = simulator.problem.values, simulator.problem.steps
    used, again = batch.used[:, 0], batch.recomputed[:, 0]
    levels = live_on_device(found, offloaded)
    live, live_again = levels.forward, levels.backward
    first = [KernelFacts((v.name,), int(live[k])) for k, v in enumerate(values) if v.in_forward]
    is_written = simulator.lifetimes.forward_stored
    stored = {v.name: v.nbytes for k, v in enumerate(values) if v.in_forward and (is_written[k] or used[k])}
    names = {int(batch.slots[v, 0]): values[v].name for v in np.flatnonzero(again)}
    names |= {int(slot): steps[b].name for b, slot in enumerate(batch.step_slots[0])}
    second = [KernelFacts((names[slot],), int(live_again[slot])) for slot in sorted(names)]
    stored_again = {values[v].name: values[v].nbytes for v in np.flatnonzero(batch.buffers[:, 0])}
    stored_again |= {
        s.name: s.nbytes for s, is_stored in zip(steps, simulator.lifetimes.step_stored, strict=True) if is_stored
    }
    forward, backward = GraphFacts(tuple(first), stored), GraphFacts(tuple(second), stored_again)
    return RegionFacts(forward, backward, levels.peak_bytes)
