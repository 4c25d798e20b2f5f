"""Attribution of a tensor that differs: its name as the user writes it, its module, and the values recomputed for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_remat._torch import joint_graph, tensor_arguments
from compile_remat.passes.graph.origins import origin_of, plain_path
from compile_remat.report import Report
from compile_remat.verify.observation import GRADIENT, INPUT, OUTPUT, RANDOM, Key

_STATE = re.compile(r"\._(?:modules|parameters|buffers)\[")


@dataclass(frozen=True)
class Arguments:
    """The user's names for the arguments and outputs of a Dynamo graph, read before any rewrite of the graph."""

    sources: tuple[str, ...]
    output_modules: tuple[str, ...]

    @staticmethod
    def of(module: fx.GraphModule) -> Arguments:
        """Returns the names in a Dynamo graph."""
        outputs: Sequence[Any] = module.graph.output_node().args[0]  # type: ignore[assignment]
        modules = (origin_of(n).module_path if isinstance(n, fx.Node) else "" for n in outputs)
        return Arguments(tuple(tensor_arguments.argument_sources(module)), tuple(modules))

    def name(self, position: int) -> str:
        """Returns the name of an argument: ``0.weight`` for a parameter, ``x`` for an argument of the function itself."""
        return plain_path(self.sources[position])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arguments."""
        return tuple(map(plain_path, self.sources))

    def module_path(self, position: int) -> str:
        """Returns the path of the module that holds a parameter or a buffer; empty for other arguments."""
        return self.name(position).rpartition(".")[0] if _STATE.search(self.sources[position]) else ""


@dataclass(frozen=True)
class SplitJoint:
    """The joint graph that a plan split, and the plan's report (None if the planner failed)."""

    joint: fx.GraphModule
    report: Report | None

    @property
    def peak_bytes(self) -> int:
        """The plan's predicted peak in bytes; 0 if there is no plan."""
        return (self.report and self.report.predicted_peak_bytes) or 0

    def gradient_order(self) -> list[int]:
        """Returns the positions of the arguments in the order in which the backward computes their gradients."""
        places = {node: place for place, node in enumerate(self.joint.graph.nodes)}
        gradients = joint_graph.gradient_nodes(self.joint)
        return sorted(gradients, key=lambda position: places[gradients[position]])

    def recomputed_before(self, position: int) -> tuple[str, ...]:
        """Returns the recomputed values on which an argument's gradient depends, by name and origin, in graph order."""
        node = joint_graph.gradient_nodes(self.joint).get(position)
        if self.report is None or self.report.plan is None or node is None:
            return ()
        saved, recomputed = set(self.report.plan.saved), set(self.report.plan.recomputed)
        stack, seen = [node], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node not in seen and node.name not in saved:
                seen.add(node)
                stack.extend(node.all_input_nodes)
        return tuple(_described(n) for n in self.joint.graph.nodes if n in seen and n.name in recomputed)

    def module_path(self, position: int) -> str:
        """Returns the path of the module whose backward computes the gradient of an argument; empty if it has none."""
        node = joint_graph.gradient_nodes(self.joint).get(position)
        return "" if node is None else origin_of(node).module_path


def _described(node: fx.Node) -> str:
    origin = origin_of(node)
    where = " ".join(x for x in (origin.module_path, f"({origin.source_line})" * bool(origin.source_line)) if x)
    return f"{node.name} {where}".rstrip()


def attribute(key: Key, arguments: Arguments, split: SplitJoint) -> tuple[str, str, tuple[str, ...]]:
    """Returns the name, the module path and the recomputed values of one observed tensor or random state."""
    kind, place = key
    if kind == RANDOM:
        return f"the random state of {place}", "", ()
    position = int(place)
    if kind == OUTPUT:
        return f"output {position}", arguments.output_modules[position], ()
    path = arguments.module_path(position)
    if kind == INPUT:
        return f"the new value of {arguments.name(position)}", path, ()
    assert kind == GRADIENT
    name = f"the gradient of {arguments.name(position)}"
    return name, path or split.module_path(position), split.recomputed_before(position)
