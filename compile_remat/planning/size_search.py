"""Up to which sizes a plan keeps its budget: the region peak as a function of the symbols of a graph.

The problem of a joint graph is built again at other sizes (`_torch.sizes.sizes_at`), and the same saved and recomputed values
are simulated there.  Peaks grow with every size for practically all graphs; evaluations inside of the box that was found check
that instead of relying on it.  With several symbols all sizes grow by the same factor: the box is a conservative one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite, prod

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat._torch.codegen_rules import RulesOf
from compile_remat._torch.sizes import FALLBACK, Symbol, sizes_at, storage_nbytes, symbols_of, unbounded_of
from compile_remat._util.size_range import SizeRange, Sizes
from compile_remat.cost_models import CostModel
from compile_remat.passes import Plan, Planner, PlanOption, Problem, build_problem, peak_bytes_of
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.request import Replay, Request, SharedOption, target_bytes_of

LOG = logging.getLogger("compile_remat")

EVALUATIONS = 8
"""Sizes at which one search for a limit evaluates the peak, at most."""

CLOSE = 0.99
"""A peak of this part of the budget ends the search: it would find sizes that are hardly larger."""

MOST_SHARE = 1e6
"""Stands for the share of sizes at which the graph is another one."""

LARGEST = 1 << 16
"""The search ends at this multiple of the planned sizes."""

INSIDE = (0.33, 0.67)
"""Where a box is checked inside, as parts of the way from the planned to the largest sizes."""

BEYOND = 2
"""How far the budget carries is told by a plan for this multiple of the largest sizes that the first plan serves."""

Share = Callable[[Sizes], float]
"""The peak at these sizes as a part of the budget there."""


@dataclass(frozen=True)
class Varying:
    """A joint graph whose sizes may vary, with its problem at the sizes that are planned for.

    Attributes:
        expandable: Whether torch's CUDA allocator has expandable segments.
    """

    joint: joint_graph.Joint
    problem: Problem
    cost: CostModel
    expandable: bool = False

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        return symbols_of(self.joint.module.graph)

    def at(self, sizes: Sizes) -> Problem:
        """The problem at other sizes.  No kernel runs: workspaces grow with the largest tensor that a node reads or makes."""
        measured = {v.name: v.workspace_bytes for v in self.problem.values if v.workspace_bytes}
        measured |= {s.name: s.workspace_bytes for s in self.problem.steps if s.workspace_bytes}
        nodes = [node for node in self.joint.module.graph.nodes if node.name in measured]
        before: dict[str, int] = {node.name: _largest_bytes(node) for node in nodes}

        def workspace(node: fx.Node, rules: RulesOf) -> int:
            grown: int = measured.get(node.name, 0) * max(1, _largest_bytes(node))
            return -(-grown // max(1, before.get(node.name, 1)))

        with sizes_at(sizes):
            return build_problem(self.joint, cost=self.cost, workspace=workspace, expandable=self.expandable)


def _largest_bytes(node: fx.Node) -> int:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    leaves = [leaf for v in values for leaf in (v if isinstance(v, list | tuple) else [v])]
    return max(map(storage_nbytes, leaves))


def range_of(
    graph: Varying, request: Request, effective: EffectiveBudget, planner: Planner, plan: Plan, plain: PlanOption | None
) -> SizeRange | None:
    """The sizes in which a plan keeps its budget; None for a graph of fixed shapes, and where there is no number to keep.

    A plan that shares its budget with other graphs answers for the sizes that it was made for.

    Args:
        plain: What plain torch.compile saves, where the budget is a fraction of what that takes, at all sizes.
    """
    symbols = graph.symbols
    if not symbols:
        return None
    planned = tuple(s.size for s in symbols)
    found = SizeRange(tuple(s.name for s in symbols), planned, planned, sources=tuple(s.source for s in symbols))
    if isinstance(request, SharedOption | Replay):
        return None if effective.budget.kind == "min" else found
    limits = [n for n in (plan.budget_bytes, target_bytes_of(request)) if n is not None]
    if not limits:
        return None
    limit_bytes, problem_at = min(limits), functools.cache(graph.at)
    follows = effective.budget.kind == "fraction" and plain is not None and limit_bytes == plan.budget_bytes
    plain_share = 0.0
    if plain is not None and follows:  # of a peak whose kernels are called in a plan's order
        plain_share = float(effective.budget.value or 0) * plain.peak_bytes / _peak_bytes(graph.problem, plain.saved)

    def limit_at(sizes: Sizes) -> float:
        if plain is None or not follows:
            return limit_bytes
        grown = _peak_bytes(problem_at(sizes), plain.saved) * plain_share
        return max(limit_bytes, min(grown, effective.limit_bytes or grown)) if isfinite(grown) else limit_bytes

    def share_of(saved: Sequence[str], again: Sequence[str], sizes: Sizes) -> float:
        return _peak_bytes(problem_at(sizes), saved, again) / limit_at(sizes)

    upper = largest_sizes(symbols, functools.partial(share_of, plan.saved, plan.again))
    found = replace(found, upper=_values(upper))
    if follows or upper == _scaled(symbols, _most(symbols)):
        return found
    low = planner.on(problem_at(tuple((name, BEYOND * size) for name, size in upper))).low()
    carried = largest_sizes(symbols, functools.partial(share_of, low, ()))
    return replace(found, carried=max(_values(upper), _values(carried), key=prod))


def log_unbounded_sizes(joint: joint_graph.Joint) -> None:
    """Warn in the log of sizes that count at a guess."""
    names = unbounded_of(joint.module.graph)
    if names:
        LOG.warning(
            "sizes that only the data knows (%s) have no upper bound, and memory_budget may not hold: each counts as %d. Give a "
            "bound with torch._check",
            ", ".join(names),
            FALLBACK,
        )


def _values(sizes: Sizes) -> tuple[int, ...]:
    return tuple(size for _, size in sizes)


def largest_sizes(symbols: Sequence[Symbol], share: Share) -> Sizes:
    """The largest sizes found up to which `share` is at most 1; those of the symbols where it is above 1 right beyond them."""
    start, most = max(s.size for s in symbols), _most(symbols)
    at = functools.cache(lambda step: share(_scaled(symbols, step)))
    low, high = start, most + 1  # steps: the budget is kept at `low`, and not known to be at `high`
    for turn in range(EVALUATIONS):  # every other time in the middle, since a convex peak's line falls short each time
        if high - low <= 1 or at(low) >= CLOSE:
            break
        step = (low + high) // 2 if high <= most and turn % 2 else _next(start, low, high, at, most)
        low, high = (step, high) if at(step) <= 1 else (low, step)
    inside = sorted({start + int(part * (low - start)) for part in INSIDE} - {start, low})
    exceeding = [step for step in inside if at(step) > 1]
    return _scaled(symbols, max(start, *[s for s in (start, *inside) if s < exceeding[0]]) if exceeding else low)


def _next(start: int, low: int, high: int, at: Callable[[int], float], most: int) -> int:
    """Where a straight line through two known peaks reaches the budget: those around it, else the last two below it."""
    share = at(low)
    if high <= most:
        slope = (min(at(high), MOST_SHARE) - share) / (high - low)
    else:
        slope = (share - at(start)) / (low - start) if low > start else share / low
    step = max(low + 1, low + int((1 - share) / slope)) if slope > 0 else high
    if step < high:
        return step
    return most if high > most else (low + high) // 2


def _most(symbols: Sequence[Symbol]) -> int:
    """The last step, limited by the sizes that Dynamo's guards let in."""
    start = max(s.size for s in symbols)
    return min(
        [LARGEST * start, *[s.upper * start // max(1, s.size) for s in symbols if s.upper is not None]], default=start
    )


def _scaled(symbols: Sequence[Symbol], step: int) -> Sizes:
    """All sizes grown by the factor that brings the largest one to `step`."""
    start = max(s.size for s in symbols)
    return tuple((s.name, s.size * step // start) for s in symbols)


def _peak_bytes(problem: Problem, saved: Sequence[str], again: Sequence[str] = ()) -> float:
    """The region peak on a problem at other sizes; infinite where the graph is another one there."""
    try:
        return peak_bytes_of(problem, saved, again)
    except ValueError:
        return float("inf")
