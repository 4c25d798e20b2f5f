"""Joint graph -> `Problem` -> `Plan` -> forward and backward modules.  Knows nothing of Inductor or the environment."""

from compile_remat.passes.graph.build import build_problem as build_problem
from compile_remat.passes.graph.extraction import extract as extract
from compile_remat.passes.problem.plan import LiveBuffer as LiveBuffer
from compile_remat.passes.problem.plan import Plan as Plan
from compile_remat.passes.problem.plan import Status as Status
from compile_remat.passes.problem.problem import Origin as Origin
from compile_remat.passes.problem.problem import Problem as Problem
from compile_remat.passes.problem.problem import Step as Step
from compile_remat.passes.problem.problem import Value as Value
from compile_remat.passes.search.pareto import frontier as frontier
from compile_remat.passes.search.plan_menu import Offer as Offer
from compile_remat.passes.search.plan_menu import offers as offers
from compile_remat.passes.search.plan_timeline import Timeline as Timeline
from compile_remat.passes.search.plan_timeline import timeline as timeline
from compile_remat.passes.search.solver import Planner as Planner
from compile_remat.passes.search.solver import solve as solve

__all__ = [
    "LiveBuffer",
    "Offer",
    "Origin",
    "Plan",
    "Planner",
    "Problem",
    "Status",
    "Step",
    "Timeline",
    "Value",
    "build_problem",
    "extract",
    "frontier",
    "offers",
    "solve",
    "timeline",
]
