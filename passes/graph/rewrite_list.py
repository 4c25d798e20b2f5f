"""The list of all rewrites, in the order in which they run.

Not in the list: torch's own preparation of a joint graph (`as_in_torch`); the search for slices (`slice_largest`), which makes
another joint graph to plan instead of changing one; and `offload_saved`, which changes a plan's forward and backward together.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from torch import fx

from compile_remat._torch.joint_graph import Joint, write_to_memory
from compile_remat.passes.graph.rewrites.addmm import keep_matmuls_in_place
from compile_remat.passes.graph.rewrites.called_regions import inline_regions
from compile_remat.passes.graph.rewrites.contract import Context, Rewrite, Rewritten, RewrittenJoint, Stage
from compile_remat.passes.graph.rewrites.convolution_gradients import (
    lay_gradients_out_once,
    split_convolution_gradients,
)
from compile_remat.passes.graph.rewrites.early_gradients import deliver_marked, mark_gradients
from compile_remat.passes.graph.rewrites.second_copies import copy_values
from compile_remat.passes.graph.rewrites.shape_only_inputs import replace_shape_only_inputs
from compile_remat.passes.graph.rewrites.sibling_gradients import make_sibling_gradients_together
from compile_remat.passes.graph.rewrites.sigmoids import separate_sigmoids
from compile_remat.passes.graph.rewrites.user_passes import run_user_passes
from compile_remat.passes.graph.rewrites.weight_gradients_first import move_weight_gradients_up
from compile_remat.passes.graph.slices.unrolling import unroll_sliced_calls
from compile_remat.passes.graph.snapshots import add_snapshots

LOG = logging.getLogger("compile_remat")


def _always(context: Context) -> bool:
    return True


def _by_inductor(context: Context) -> bool:
    return context.by_inductor


REWRITES = (
    Rewrite(
        "inline_regions",
        Stage.PROGRAM,
        lambda module, context: inline_regions(module),
        lambda context: context.inlines_regions,
        "AOTAutograd partitions the body of a called region by itself, so no plan covers it",
    ),
    Rewrite(
        "replace_shape_only_inputs",
        Stage.JOINT,
        lambda module, context: replace_shape_only_inputs(module, context.classified.info.unclaimed_nodes),
        _always,
        "a pooling's backward reads the size of an input, which would be saved for nothing",
    ),
    Rewrite(
        "split_convolution_gradients",
        Stage.JOINT,
        lambda module, context: split_convolution_gradients(context.classified),
        lambda context: context.splits_convolutions,
        "one operator for both gradients holds the convolution's input and both results at once",
    ),
    Rewrite(
        "separate_sigmoids",
        Stage.JOINT,
        lambda module, context: separate_sigmoids(module),
        _always,
        "a denominator with two readers is written to memory and keeps Inductor from reuse in place",
    ),
    Rewrite(
        "move_weight_gradients_up",
        Stage.JOINT,
        lambda module, context: move_weight_gradients_up(module, context.classified.info.tangents_closure),
        _always,
        "in autograd's order, a product's operand is alive beside the gradient of that operand",
    ),
    Rewrite(
        "make_sibling_gradients_together",
        Stage.JOINT,
        lambda module, context: make_sibling_gradients_together(module, context.classified.info.tangents_closure),
        _always,
        "a gradient that is computed beside its sibling reuses memory that is held until then",
    ),
    Rewrite(
        "run_user_passes",
        Stage.JOINT,
        lambda module, context: run_user_passes(context.classified, context.passes),
        lambda context: bool(context.passes),
        "the setting joint_passes asks for it",
    ),
    Rewrite(
        "mark_gradients",
        Stage.JOINT,
        lambda module, context: mark_gradients(context.classified, context.early or ()),
        lambda context: context.early is not None,
        "the planner has to see a gradient die where it leaves the backward",
    ),
    Rewrite(
        "add_snapshots",
        Stage.JOINT,
        lambda module, context: add_snapshots(context.classified),
        lambda context: context.has_snapshots,
        "an input may change before the backward runs",
    ),
    Rewrite(
        "copy_values",
        Stage.EXTRACTED,
        lambda module, context: copy_values(module, context.classified, frozenset(context.extracted_for.again)),
        lambda context: bool(context.extracted_for.again),
        "the plan computes these values twice in the backward",
    ),
    Rewrite(
        "write_to_memory",
        Stage.EXTRACTED,
        lambda module, context: Rewritten(write_to_memory(module, frozenset(context.extracted_for.written))),
        lambda context: bool(context.extracted_for.written),
        "the plan has these values in memory where Inductor would leave them to a later reader",
    ),
    Rewrite(
        "unroll_sliced_calls",
        Stage.FORWARD,
        lambda module, context: unroll_sliced_calls(module),
        _by_inductor,
        "Inductor does not know a sliced call",
    ),
    Rewrite(
        "deliver_marked",
        Stage.BACKWARD,
        lambda module, context: deliver_marked(module, context.classified),
        lambda context: context.joint is not None,
        "each marked gradient leaves here",
    ),
    Rewrite(
        "unroll_sliced_calls",
        Stage.BACKWARD,
        lambda module, context: unroll_sliced_calls(module),
        _by_inductor,
        "Inductor does not know a sliced call",
    ),
    Rewrite(
        "lay_gradients_out_once",
        Stage.BACKWARD,
        lambda module, context: lay_gradients_out_once(module, context.forward),
        _by_inductor,
        "Inductor would copy a gradient for each of the two operators of a split convolution",
    ),
    Rewrite(
        "keep_matmuls_in_place",
        Stage.BACKWARD,
        lambda module, context: keep_matmuls_in_place(module),
        lambda context: context.by_inductor and context.guarded,
        "Inductor would move a product down to a later addition and hold its operands until there",
    ),
)
"""All rewrites.  Those of one stage run one after the other; a rewrite may rely on the results of those before it."""


def apply_to_joint(joint: Joint, context: Context, only: Collection[str] = ()) -> RewrittenJoint:
    """Run the rewrites of stage `JOINT` that apply, in place; logs the count of each at debug.  Without a backward none runs.

    Args:
        context: Its `joint` is not read.
        only: Names of the rewrites to run; empty for all.

    Returns:
        The sum of all counts, the graph's new classification, and the reason why a rewrite that was asked for changed nothing.

    Raises:
        ValueError: `only` names a rewrite that the stage does not have.
    """
    rewrites = _rewrites_of(Stage.JOINT)
    if unknown := set(only).difference(rewrite.name for rewrite in rewrites):
        raise ValueError(f"no rewrite of a joint graph: {', '.join(sorted(unknown))}")
    total, why_not = 0, ""
    for rewrite in rewrites if joint.has_backward else ():
        context = replace(context, joint=joint)
        if (only and rewrite.name not in only) or not rewrite.applies(context):
            continue
        done = _run(rewrite, joint.module, context)
        total += done.count
        if isinstance(done, RewrittenJoint):
            joint, why_not = done.joint, why_not or done.why_not
    return RewrittenJoint(total, joint, why_not)


def apply(stage: Stage, module: fx.GraphModule, context: Context) -> Rewritten:
    """Run the rewrites of any other stage that apply, in place; logs the count of each at debug.  Returns the sum of all counts."""
    return Rewritten(sum(_run(r, module, context).count for r in _rewrites_of(stage) if r.applies(context)))


def _rewrites_of(stage: Stage) -> list[Rewrite]:
    return [rewrite for rewrite in REWRITES if rewrite.stage is stage]


def _run(rewrite: Rewrite, module: fx.GraphModule, context: Context) -> Rewritten:
    before = len(module.graph.nodes)
    done = rewrite.run(module, context)
    LOG.debug("%s: %s: %d, nodes %d -> %d", rewrite.stage, rewrite.name, done.count, before, len(module.graph.nodes))
    return done
