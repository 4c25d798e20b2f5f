"""The type of a rewrite: the graph that it changes, its function, the cases that it applies to, and the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from compile_remat._torch.joint_graph import Joint
from compile_remat._util.user_pass import UserPass
from compile_remat.passes.problem.plan import Plan


class Stage(StrEnum):
    """The graphs that rewrites change, in the order in which a compilation has them."""

    PROGRAM = "program"
    """The graph that Dynamo made of the user's code, before AOTAutograd adds a backward."""

    JOINT = "joint"
    """The joint graph, before it is planned."""

    EXTRACTED = "extracted"
    """The backward of a plan, before torch puts its nodes in execution order."""

    FORWARD = "forward"
    """The forward of a plan."""

    BACKWARD = "backward"
    """The backward of a plan, or a graph that contains its own backward."""


@dataclass(frozen=True)
class Rewritten:
    """The result of a rewrite, which has changed its graph in place.

    Attributes:
        count: Number of places that the rewrite has changed; each rewrite says what it counts.
    """

    count: int


@dataclass(frozen=True)
class RewrittenJoint(Rewritten):
    """The result of a rewrite that also changes the classification of a joint graph.

    Attributes:
        joint: The graph with its new classification.
        why_not: The reason why nothing was changed, in words; empty if something was, or if there is nothing to say.
    """

    joint: Joint
    why_not: str = ""


@dataclass(frozen=True)
class Context:
    """Everything that rewrites know besides the graph that they change.

    Attributes:
        joint: The joint graph with its classification: the graph itself in stage `JOINT`, later the graph that forward and backward
            were extracted from.  None for a graph that was extracted from none.
        inlines_regions: True to plan the bodies of called regions as a part of the graph.
        splits_convolutions: True to compute a convolution's gradients one after the other: a second kernel call for a lower peak.
            `lay_gradients_out_once` then has to run on the backward if Inductor compiles it.
        early: Positions of the arguments whose gradients are to leave the backward when they are made; None if no gradient is.
        passes: Passes of the user, in their order.
        has_snapshots: True if the backward reads snapshots in place of inputs that may change before it runs.
        plan: The plan that forward and backward were extracted for; needed in stage `EXTRACTED` alone.
        forward: The forward of the backward that is rewritten; None if the graph contains its forward.
        by_inductor: True if Inductor compiles the graph.
        guarded: True if Inductor's fusions are kept to the plan.
    """

    joint: Joint | None = None
    inlines_regions: bool = False
    splits_convolutions: bool = False
    early: Collection[int] | None = None
    passes: tuple[UserPass, ...] = ()
    has_snapshots: bool = False
    plan: Plan | None = None
    forward: fx.GraphModule | None = None
    by_inductor: bool = False
    guarded: bool = False

    @property
    def classified(self) -> Joint:
        """The joint graph, for rewrites that apply only if there is one."""
        assert self.joint is not None
        return self.joint

    @property
    def extracted_for(self) -> Plan:
        """The plan, for rewrites that apply only if there is one."""
        assert self.plan is not None
        return self.plan


@dataclass(frozen=True)
class Rewrite:
    """One rewrite of the list.

    Attributes:
        name: The name of its function.
        stage: The graph that it changes.
        run: Changes the graph in place, and keeps its results.
        applies: Returns whether the rewrite runs at all.
        why: The reason for it, in one line.
    """

    name: str
    stage: Stage
    run: Callable[[fx.GraphModule, Context], Rewritten]
    applies: Callable[[Context], bool]
    why: str
