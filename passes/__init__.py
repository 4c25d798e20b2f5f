"""Joint graph -> `Problem` -> `Plan` -> forward and backward modules.  The code is independent of Inductor and the environment."""

from compile_remat._util.live_buffer import LiveBuffer as LiveBuffer
from compile_remat.passes.graph.build import ProblemBuilder as ProblemBuilder
from compile_remat.passes.graph.build import build_problem as build_problem
from compile_remat.passes.graph.extraction import extract as extract
from compile_remat.passes.graph.inner_backward import InnerBackward as InnerBackward
from compile_remat.passes.graph.inner_backward import as_joint as as_joint
from compile_remat.passes.graph.inner_backward import backward_calls as backward_calls
from compile_remat.passes.graph.inner_backward import merged as merged
from compile_remat.passes.graph.inner_backward import with_whole_forward as with_whole_forward
from compile_remat.passes.graph.inner_backward import without_common_subexpressions as without_common_subexpressions
from compile_remat.passes.graph.normalise import as_in_torch as as_in_torch
from compile_remat.passes.graph.normalise import rewritten as rewritten
from compile_remat.passes.graph.origins import origin_of as origin_of
from compile_remat.passes.graph.origins import plain_path as plain_path
from compile_remat.passes.graph.outputs import changeable_outputs as changeable_outputs
from compile_remat.passes.graph.outputs import left_alone as left_alone
from compile_remat.passes.graph.pins import must_be_saved as must_be_saved
from compile_remat.passes.graph.read_inputs import inputs_handed_over as inputs_handed_over
from compile_remat.passes.graph.read_inputs import positions_of_inputs as positions_of_inputs
from compile_remat.passes.graph.rewrites.addmm import keep_matmuls_in_place as keep_matmuls_in_place
from compile_remat.passes.graph.rewrites.convolution_gradients import lay_gradients_out_once as lay_gradients_out_once
from compile_remat.passes.graph.rewrites.convolution_gradients import (
    split_convolution_gradients as split_convolution_gradients,
)
from compile_remat.passes.graph.rewrites.early_gradients import NO_LEAF as NO_LEAF
from compile_remat.passes.graph.rewrites.early_gradients import deliver_marked as deliver_marked
from compile_remat.passes.graph.rewrites.early_gradients import mark_gradients as mark_gradients
from compile_remat.passes.graph.rewrites.early_gradients import marked_bytes as marked_bytes
from compile_remat.passes.graph.slices.largest import NotSliced as NotSliced
from compile_remat.passes.graph.slices.largest import SlicedGraph as SlicedGraph
from compile_remat.passes.graph.slices.largest import slice_largest as slice_largest
from compile_remat.passes.graph.slices.largest import slice_products as slice_products
from compile_remat.passes.graph.slices.unrolling import unroll_sliced_calls as unroll_sliced_calls
from compile_remat.passes.graph.snapshots import add_snapshots as add_snapshots
from compile_remat.passes.graph.snapshots import readable_inputs as readable_inputs
from compile_remat.passes.graph.snapshots import unreadable_inputs as unreadable_inputs
from compile_remat.passes.memory.facts_by_node import NodeFacts as NodeFacts
from compile_remat.passes.memory.facts_by_node import NodeTable as NodeTable
from compile_remat.passes.memory.observed_plans import assumptions_after as assumptions_after
from compile_remat.passes.memory.observed_plans import largest_at_peak as largest_at_peak
from compile_remat.passes.memory.plan_timeline import Timeline as Timeline
from compile_remat.passes.memory.plan_timeline import peak_bytes_of as peak_bytes_of
from compile_remat.passes.memory.plan_timeline import timeline as timeline
from compile_remat.passes.memory.simulator import Bools as Bools
from compile_remat.passes.pictures.plan_pictures import PlanPictures as PlanPictures
from compile_remat.passes.pictures.plan_pictures import StoredPictures as StoredPictures
from compile_remat.passes.pictures.plan_pictures import marked as marked
from compile_remat.passes.pictures.plan_pictures import pictured as pictured
from compile_remat.passes.problem.constant_inputs import has_snapshots as has_snapshots
from compile_remat.passes.problem.constant_inputs import without_snapshots as without_snapshots
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
from compile_remat.passes.problem.tags import LIKE_TORCH as LIKE_TORCH
from compile_remat.passes.problem.tags import MUST as MUST
from compile_remat.passes.problem.tags import obeyed_tags as obeyed_tags
from compile_remat.passes.problem.tags import obeying as obeying
from compile_remat.passes.problem.tags import relaxations as relaxations
from compile_remat.passes.problem.work_budget import CLOCK as CLOCK
from compile_remat.passes.problem.work_budget import WORK as WORK
from compile_remat.passes.problem.work_budget import limit_seconds as limit_seconds
from compile_remat.passes.search.options import SearchOptions as SearchOptions
from compile_remat.passes.search.pareto import frontier as frontier
from compile_remat.passes.search.plain_time import plain_time_ns as plain_time_ns
from compile_remat.passes.search.plan_menu import PlanOption as PlanOption
from compile_remat.passes.search.plan_menu import backward_peak_bytes as backward_peak_bytes
from compile_remat.passes.search.plan_menu import option_of as option_of
from compile_remat.passes.search.plan_menu import plain_option as plain_option
from compile_remat.passes.search.plan_menu import plan_options as plan_options
from compile_remat.passes.search.solver import Planner as Planner
from compile_remat.passes.search.solver import solve as solve

__all__ = [
    "CLOCK",
    "LIKE_TORCH",
    "MUST",
    "MUST_RECOMPUTE",
    "MUST_SAVE",
    "NO_LEAF",
    "PREFER_RECOMPUTE",
    "WORK",
    "Bools",
    "InnerBackward",
    "LiveBuffer",
    "NodeFacts",
    "NodeTable",
    "NotSliced",
    "Origin",
    "PlainFacts",
    "Plan",
    "PlanOption",
    "Planner",
    "Problem",
    "ProblemBuilder",
    "SearchOptions",
    "SlicedGraph",
    "SlicedProduct",
    "Status",
    "Step",
    "StoredPictures",
    "Timeline",
    "Value",
    "as_in_torch",
    "as_joint",
    "backward_calls",
    "backward_peak_bytes",
    "build_problem",
    "changeable_outputs",
    "deliver_marked",
    "extract",
    "frontier",
    "inputs_handed_over",
    "keep_matmuls_in_place",
    "lay_gradients_out_once",
    "left_alone",
    "limit_seconds",
    "mark_gradients",
    "marked",
    "marked_bytes",
    "merged",
    "must_be_saved",
    "obeyed_tags",
    "obeying",
    "option_of",
    "origin_of",
    "peak_bytes_of",
    "pictured",
    "plain_option",
    "plain_path",
    "plain_time_ns",
    "plan_options",
    "positions_of_inputs",
    "relaxations",
    "rewritten",
    "slice_largest",
    "slice_products",
    "solve",
    "split_convolution_gradients",
    "timeline",
    "unroll_sliced_calls",
    "with_whole_forward",
    "without_common_subexpressions",
]
