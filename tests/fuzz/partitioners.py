"""Partitions that no planner would choose: any legal plan at random, and the one that recomputes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from functorch.compile import default_partition
from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.cost_models import load_device, make_cost_model
from compile_remat.inductor.entry import CustomPartitionerFn
from compile_remat.passes import Plan, Planner, build_problem, extract
from compile_remat.passes.memory.buffers import Bools
from compile_remat.passes.problem.plan import Offloaded


def random_plan(planner: Planner, seed: int, *, moves: bool = True) -> Plan:
    """A legal plan: all values that must be saved, and a random part of those that may be.

    Args:
        moves: True to send a random part of the saved values to the host, for a random time.
    """
    source = random.Random(seed)
    share = source.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    values = planner.problem.values
    mask = np.array([v.is_saveable and source.random() < share for v in values], dtype=bool)
    mask |= planner.pinned
    return replace(planner.plan_of(mask, None), offloaded=tuple(_moved(planner, mask, source)) if moves else ())


def _moved(planner: Planner, mask: Bools, source: random.Random) -> Iterator[Offloaded]:
    curve, share = planner.curve(mask), source.choice((0.0, 0.5, 1.0))
    for each in curve.movable:
        if source.random() < share:
            places = [name for name in curve.places[each.last_read + 1 :] if name]
            slot = source.randint(0, each.first_read)
            yield Offloaded(each.name, source.choice([*places, ""]), curve.slots[slot])


class Forced(CustomPartitionerFn):
    """A partitioner that takes the plan of a seed, for our entries to torch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split as the plan says."""
        joint = prepare(gm, keywords)
        if not joint.has_backward:
            return joint_graph.torch_partition(gm, joint_inputs, **_shape_of_graph(keywords))
        moves = not joint_graph.has_symbolic_sizes(joint)
        return extract(joint, self.plan(planner_of(joint), moves=moves))

    def plan(self, planner: Planner, *, moves: bool) -> Plan:
        """The plan of the seed."""
        return random_plan(planner, self.seed, moves=moves)

    def uuid(self) -> object:
        """Nothing is cached in these runs."""
        return self.seed


class Moving(Forced):
    """The same with a plan that sends tensors to the host, if there is one among some."""

    def plan(self, planner: Planner, *, moves: bool) -> Plan:
        """The first of several plans with random tensors on the host; the last one if none has any."""
        for seed in range(1000 * self.seed, 1000 * self.seed + 20):
            plan = random_plan(planner, seed, moves=moves)
            if plan.offloaded:
                break
        return plan


class Unplanned(CustomPartitionerFn):
    """Torch's partition that saves whatever the backward reads, in checkpoints, too."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split, recomputing nothing."""
        for node in gm.graph.nodes:
            node.meta.pop("recompute", None)  # with it, torch would take its minimum cut
        joint = copy.deepcopy(gm)
        try:
            modules: tuple[fx.GraphModule, fx.GraphModule] = default_partition(
                gm, joint_inputs, **_shape_of_graph(keywords)
            )
        except AssertionError as error:
            if "was invalid, but is output" not in str(error):
                raise
            return _saving_everything(prepare(joint, keywords))  # torch 2.13, where an output is a part of a tuple
        return modules

    def uuid(self) -> object:
        """Nothing is cached in these runs."""
        return type(self).__name__


def _saving_everything(joint: joint_graph.Joint) -> tuple[fx.GraphModule, fx.GraphModule]:
    planner = planner_of(joint)
    return extract(joint, planner.plan_of(planner.pinned | [v.is_saveable for v in planner.problem.values], None))


def _shape_of_graph(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: keywords.get(name) for name in ("num_fwd_outputs", "static_lifetime_input_indices")}


def prepare(gm: fx.GraphModule, keywords: Mapping[str, Any]) -> joint_graph.Joint:
    """A joint graph, from what a partitioner is called with."""
    return joint_graph.prepare(gm, **_shape_of_graph(keywords))


def planner_of(joint: joint_graph.Joint) -> Planner:
    """The planner of a joint graph, as the backend would make it on CPU."""
    cost = make_cost_model("roofline", load_device("cpu"))
    return Planner(build_problem(joint, cost=cost, reference=joint_graph.torch_choice(joint)))
