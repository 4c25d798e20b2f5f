"""Joint graph -> `Problem` -> `Plan` -> forward and backward modules.  The code is independent of Inductor and the environment."""

from compile_remat._util.live_buffer import LiveBuffer as LiveBuffer
from compile_remat.passes.graph.build import ProblemBuilder as ProblemBuilder
from compile_remat.passes.graph.build import build_problem as build_problem
from compile_remat.passes.graph.extraction import extract as extract
from compile_remat.passes.memory.facts_by_node import NodeFacts as NodeFacts
from compile_remat.passes.memory.facts_by_node import NodeTable as NodeTable
from compile_remat.passes.memory.plan_timeline import Timeline as Timeline
from compile_remat.passes.memory.plan_timeline import timeline as timeline
from compile_remat.passes.problem.facts import NOTHING_ASSUMED as NOTHING_ASSUMED
from compile_remat.passes.problem.facts import Assumptions as Assumptions
from compile_remat.passes.problem.facts import BufferFacts as BufferFacts
from compile_remat.passes.problem.facts import GraphFacts as GraphFacts
from compile_remat.passes.problem.facts import KernelFacts as KernelFacts
from compile_remat.passes.problem.facts import PlainFacts as PlainFacts
from compile_remat.passes.problem.facts import RegionFacts as RegionFacts
from compile_remat.passes.problem.plan import Plan as Plan
from compile_remat.passes.problem.plan import SlicedProduct as SlicedProduct
from compile_remat.passes.problem.plan import Status as Status
from compile_remat.passes.problem.problem import MUST_RECOMPUTE as MUST_RECOMPUTE
from compile_remat.passes.problem.problem import MUST_SAVE as MUST_SAVE
from compile_remat.passes.problem.problem import PREFER_RECOMPUTE as PREFER_RECOMPUTE
from compile_remat.passes.problem.problem import Origin as Origin
from compile_remat.passes.problem.problem import Problem as Problem
from compile_remat.passes.problem.problem import Step as Step
from compile_remat.passes.problem.problem import Value as Value
from compile_remat.passes.search.options import SearchOptions as SearchOptions
from compile_remat.passes.search.pareto import frontier as frontier
from compile_remat.passes.search.plain_time import plain_time_ns as plain_time_ns
from compile_remat.passes.search.plan_menu import PlanOption as PlanOption
from compile_remat.passes.search.plan_menu import plain_option as plain_option
from compile_remat.passes.search.plan_menu import plan_options as plan_options
from compile_remat.passes.search.solver import Planner as Planner
from compile_remat.passes.search.solver import solve as solve

__all__ = [
    "MUST_RECOMPUTE",
    "MUST_SAVE",
    "NOTHING_ASSUMED",
    "PREFER_RECOMPUTE",
    "Assumptions",
    "BufferFacts",
    "GraphFacts",
    "KernelFacts",
    "LiveBuffer",
    "NodeFacts",
    "NodeTable",
    "Origin",
    "PlainFacts",
    "Plan",
    "PlanOption",
    "Planner",
    "Problem",
    "ProblemBuilder",
    "RegionFacts",
    "SearchOptions",
    "SlicedProduct",
    "Status",
    "Step",
    "Timeline",
    "Value",
    "build_problem",
    "extract",
    "frontier",
    "plain_option",
    "plain_time_ns",
    "plan_options",
    "solve",
    "timeline",
]
