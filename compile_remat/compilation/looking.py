"""Plans one Dynamo graph without compiling it; lowers and reads its plans if the caller asks for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from compile_remat._torch.dynamo.names import compiled_name
from compile_remat._torch.joint_graph import copied_graph
from compile_remat._util.size_range import Sizes
from compile_remat.compilation.driver import Compilation
from compile_remat.compilation.early_gradients import leaf_positions
from compile_remat.compilation.rounds import Rounds
from compile_remat.config import RematConfig
from compile_remat.inductor import inductor_options
from compile_remat.inductor.peek import look_at_joint_graph
from compile_remat.partitioning.partitioner import RematPartitioner
from compile_remat.passes import PlainFacts
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.called_regions import inlined_calls
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.planning.joint_planning import Planned
from compile_remat.planning.joint_problem import JointModule, PlanContext
from compile_remat.planning.pipeline import plan_graph
from compile_remat.planning.settings import Settings, priced, settings_for, sizes_of


def look_at_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    *,
    for_budgets: bool = False,
    observes: bool = False,
) -> Planned | None:
    """The plan of a graph on this machine, or on the device that `config` names; None if the graph has no backward.

    Args:
        for_budgets: True to build the problem in which budgets are searched, under `max` as well.
        observes: True to lower and read plans as in training, if the device is here.

    Raises:
        RematError: No plan fits, or a setting is off.
    """
    options = inductor_options.mode_options(config.mode)
    settings = settings_for(config, example_inputs)
    apply(Stage.PROGRAM, gm, Context(inlines_regions=settings.has_limit(gm)))
    settings = priced(settings, gm, example_inputs, config, options)
    observes = observes and settings.is_here and config.compiler == "inductor"
    return planned_graph(gm, example_inputs, config, settings, options, for_budgets=for_budgets, observes=observes)


def planned_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: RematConfig,
    settings: Settings,
    options: Mapping[str, Any],
    *,
    for_budgets: bool = False,
    observes: bool = False,
    plain: dict[Sizes, PlainFacts | None] | None = None,
) -> Planned | None:
    """The plan of a graph under given settings; None if the graph has no backward.

    Args:
        options: Inductor's options.
        observes: True to lower and read plans; Inductor has to make code for the devices of `example_inputs`.
        plain: The argument `plain` of `Compilation`.
    """
    name = compiled_name(gm.graph)
    early = leaf_positions(example_inputs) if config.gradients == "early" else ()
    first = RematPartitioner(settings, sizes=sizes_of(example_inputs), early=early, guarded=settings.has_limit(gm))
    rounds = Rounds(first)
    if observes:
        rounds = Compilation(copied_graph(gm), example_inputs, config, options, plain=plain).lowered(first)
    taken = rounds.partitioner
    context = PlanContext(
        with_plain=True, for_budgets=for_budgets, early=early, assumed=taken.assumed, searches=taken.searches
    )
    planned = look_at_joint_graph(
        gm,
        example_inputs,
        lambda joint, keywords: plan_graph(JointModule(joint, **keywords), settings, taken.request, context),
        dict(options),
    )
    if planned is None:
        return None
    report = rounds.concluded(planned.report)
    return replace(planned, report=replace(report, inlined_calls=inlined_calls(gm), module=name))
