"""Finds the largest sizes at which a plan keeps its budget, from the region peak as a function of a graph's symbols.

The problem of a joint graph is built again at other sizes (`_torch.sizes.sizes_at`), and the same saved and recomputed values
are simulated there.  Peaks grow with every size for practically all graphs; the search checks this by evaluations inside of the
box that it found.  With several symbols all sizes grow by the same factor, so the box is conservative.
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
from compile_remat.passes import Plan, Planner, PlanOption, Problem, build_problem
from compile_remat.passes.memory.plan_timeline import peak_bytes_of
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.request import Replay, Request, SharedOption, target_bytes_of

LOG = logging.getLogger("compile_remat")

EVALUATIONS = 8
"""Sizes at which one search for the largest sizes evaluates the peak, at most."""

CLOSE = 0.99
"""The search ends once the peak reaches this share of the budget: further sizes would be hardly larger."""

MOST_SHARE = 1e6
"""Replaces an infinite share of the budget, as at sizes for which the graph is another one."""

LARGEST = 1 << 16
"""The search goes up to this multiple of the planned sizes."""

INSIDE = (0.33, 0.67)
"""Sizes inside of a box at which the peak is checked, as fractions of the way from the planned to the largest sizes."""

BEYOND = 2
"""A low plan at this multiple of the first plan's largest sizes tells the largest sizes that any plan may reach."""

Share = Callable[[Sizes], float]
"""Maps sizes to the peak as a share of the budget there."""


@dataclass(frozen=True)
class Varying:
    """A joint graph whose sizes may vary, with its problem at the planned sizes.

    Attributes:
        expandable: True if torch's CUDA allocator has expandable segments.
    """

    joint: joint_graph.Joint
    problem: Problem
    cost: CostModel
    expandable: bool = False

    @cached_property
    def symbols(self) -> tuple[Symbol, ...]:
        return symbols_of(self.joint.module.graph)

    def at(self, sizes: Sizes) -> Problem:
        """Returns the problem at other sizes without running kernels: workspaces scale with a node's largest input or output."""
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
    """Returns the sizes up to which a plan keeps its budget; None for a graph of fixed shapes, and if no bytes limit the peak.

    For a plan that shares its budget with other graphs, the largest sizes are the planned ones.

    Args:
        plain: Plain torch.compile's plan option, whose peak at each size a fraction multiplies; None if there is no fraction.
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
    if plain is not None and follows:  # relative to the peak of plain's saved values with the kernels in a plan's order
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
    """Warn in the log of data-dependent sizes without an upper bound, which count as `FALLBACK`."""
    names = unbounded_of(joint.module.graph)
    if names:
        LOG.warning(
            "data-dependent sizes (%s) have no upper bound, and memory_budget may not hold: the plan takes each as %d. Give a "
            "bound with torch._check",
            ", ".join(names),
            FALLBACK,
        )


def _values(sizes: Sizes) -> tuple[int, ...]:
    return tuple(size for _, size in sizes)


def largest_sizes(symbols: Sequence[Symbol], share: Share) -> Sizes:
    """Returns the largest sizes found up to which `share` is at most 1; the planned sizes if it is above 1 right beyond them."""
    start, most = max(s.size for s in symbols), _most(symbols)
    at = functools.cache(lambda step: share(_scaled(symbols, step)))
    low, high = start, most + 1  # steps: the peak fits the budget at `low`, and is not known to fit at `high`
    for turn in range(EVALUATIONS):  # every other step bisects, since the line through a convex peak always falls short
        if high - low <= 1 or at(low) >= CLOSE:
            break
        step = (low + high) // 2 if high <= most and turn % 2 else _next(start, low, high, at, most)
        low, high = (step, high) if at(step) <= 1 else (low, step)
    inside = sorted({start + int(part * (low - start)) for part in INSIDE} - {start, low})
    exceeding = [step for step in inside if at(step) > 1]
    return _scaled(symbols, max(start, *[s for s in (start, *inside) if s < exceeding[0]]) if exceeding else low)


def _next(start: int, low: int, high: int, at: Callable[[int], float], most: int) -> int:
    """Returns the step at which a straight line through two known peaks reaches the budget.

    The peaks are those at `low` and `high` if both are known, else those at `start` and `low`.
    """
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
    """Returns the last step of the search, limited by `LARGEST` and by the sizes that Dynamo's guards admit."""
    start = max(s.size for s in symbols)
    return min(
        [LARGEST * start, *[s.upper * start // max(1, s.size) for s in symbols if s.upper is not None]], default=start
    )


def _scaled(symbols: Sequence[Symbol], step: int) -> Sizes:
    """Returns all sizes scaled by the factor that brings the largest one to `step`."""
    start = max(s.size for s in symbols)
    return tuple((s.name, s.size * step // start) for s in symbols)


def _peak_bytes(problem: Problem, saved: Sequence[str], again: Sequence[str] = ()) -> float:
    """Returns the region peak on a problem at other sizes; infinite if the graph is another one there."""
    try:
        return peak_bytes_of(problem, saved, again)
    except ValueError:
        return float("inf")
