"""The words about saved tensors on the host: said only where recomputation alone cannot keep the budget."""

from __future__ import annotations

from compile_remat._util.units import format_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.passes import Link, Planner
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.plan_policy import choose
from tests.oracles.random_problems import chain
from tests.oracles.scaled import BYTES, scaled

LINK = Link(10**12, 10**12, 1 << 50)


def test_min_and_budgets_below_recomputation_name_the_peak_that_it_reaches() -> None:
    problem = scaled(chain(7))
    kept = Planner(problem).lowest()
    reached = f"the lowest plan found that only recomputes peaks at {format_bytes(kept.peak_bytes)}"
    for budget in (MemoryBudget("min"), MemoryBudget("bytes", kept.peak_bytes - BYTES)):
        chosen = choose(Planner(problem, link=LINK), EffectiveBudget(budget))
        assert chosen.plan.offloaded and chosen.plan.peak_bytes < kept.peak_bytes
        assert reached in chosen.message and format_bytes(chosen.plan.offloaded_bytes) in chosen.message
        assert ("on the host", chosen.plan.offload_text) in chosen.plan.figures().facts


def test_where_copies_are_only_faster_nothing_is_said() -> None:
    problem = scaled(chain(7))
    budget = MemoryBudget("bytes", Planner(problem).lowest().peak_bytes + BYTES)
    chosen = choose(Planner(problem, link=LINK), EffectiveBudget(budget))
    assert chosen.plan.offloaded and not chosen.message
    assert not choose(Planner(problem), EffectiveBudget(MemoryBudget("min"))).message
