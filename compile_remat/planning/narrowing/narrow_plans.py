"""A plan that was found where every value has a narrow form, in the graph that has those alone that it saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compile_remat.passes import MUST, Planner, obeying
from compile_remat.planning.request import ChosenPlan


def without_narrow(
    chosen: ChosenPlan, planner: Planner, dropped: Mapping[str, str], budget_bytes: int | None
) -> ChosenPlan:
    """The same choice, with the figures that it has in `planner`'s problem.

    Args:
        dropped: For every node that is not in that problem any more, the value that it stood for.
    """
    plan = chosen.plan
    saved = dict.fromkeys(dropped.get(name, name) for name in plan.saved)
    again = tuple(dict.fromkeys(dropped.get(name, name) for name in plan.again))
    lenient = planner.on(obeying(planner.problem, MUST))  # a plan may have set aside what the tags prefer
    found = lenient.plan_of(lenient.mask_of(saved), budget_bytes, tuple(name for name in again if name not in saved))
    status = plan.status if found.is_feasible == plan.is_feasible else found.status
    floor_bytes = found.peak_bytes if chosen.floor_bytes == plan.peak_bytes else chosen.floor_bytes
    return replace(chosen, plan=replace(found, status=status), floor_bytes=floor_bytes)
