"""Keeps Inductor to the plan while it compiles a graph: the kernels that it fuses, their order, and how it calls them.

The choices handler and the scheduler pass are set for the compilation of one graph only, also for a backward that torch compiles
later: plain Inductor in the same process is not touched.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx
from torch._inductor import config as inductor_config

from compile_remat._torch.delivery.inductor_lowering import drop_waiting_from_users
from compile_remat._torch.offload.copy_check import check_copies
from compile_remat._torch.version import private_module, private_name
from compile_remat.inductor.cpp_kernels.scheduling import replace_backends
from compile_remat.inductor.fusion_guard import GuardedChoices, fuse_up_to_peak
from compile_remat.inductor.kernel_order import move_kernels
from compile_remat.inductor.light_code.reading import Told, watch
from compile_remat.inductor.observe import GraphCompiler

V = private_name("torch._inductor.virtualized", "V")
GraphLowering = private_name("torch._inductor.graph", "GraphLowering")
if TYPE_CHECKING:
    CustomSchedulerPass = object
else:  # before 2.13 one class serves all passes, and torch's graph cache identifies a scheduler pass by that class
    _passes = private_module("torch._inductor.custom_graph_pass")
    CustomSchedulerPass = getattr(_passes, "CustomSchedulerPass", None) or _passes.CustomGraphPass


def guarded(compiler: GraphCompiler, *, fuses_more: bool = False) -> GraphCompiler:
    """Returns `compiler` under `GuardedChoices` and `PlannedKernels`; backwards keep a forward's eager convolution layout.

    The compiler raises `CopiesMisplaced` for code that uses a tensor while offload copies it.

    Args:
        fuses_more: True for `MoreFusions`, too.
    """
    is_contiguous = False

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal is_contiguous
        patches: dict[str, Any] = {
            "_pre_fusion_custom_pass": PlannedKernels.behind(inductor_config._pre_fusion_custom_pass),
        }
        if fuses_more:
            patches["_post_fusion_custom_pass"] = MoreFusions.behind(inductor_config._post_fusion_custom_pass)
        if not options.get("is_backward"):
            is_contiguous = _keeps_layouts(gm)
        elif is_contiguous:
            patches["layout_optimization"] = False
        with V.set_choices_handler(GuardedChoices()), inductor_config.patch(patches):
            compiled = compiler(gm, example_inputs, **options)
        check_copies(getattr(compiled, "source_code", None) or "")
        return compiled

    return compile_graph


def _keeps_layouts(forward: fx.GraphModule) -> bool:
    """Returns whether the forward has convolutions and Inductor leaves their layout as it is.

    Inductor decides for each graph by that graph's convolutions, and a backward has only some of the forward's.  A U-Net's forward
    keeps eager mode's layout because of its decoder; its backward at `min`, without a decoder, took 64 MiB of 630 for a copy in
    another layout.
    """
    has_convolutions = bool(forward.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default))
    return has_convolutions and not GraphLowering.decide_layout_opt(forward, is_inference=False)


def watched(compiler: GraphCompiler) -> GraphCompiler:
    """Returns `compiler` with one more option: `told`, which `watch` calls with the graph once it is lowered."""

    def compile_graph(
        gm: fx.GraphModule, example_inputs: Sequence[Any], *, told: Told | None = None, **options: Any
    ) -> Any:
        watching = Watching.behind(inductor_config._pre_fusion_custom_pass, told)
        with inductor_config.patch(_pre_fusion_custom_pass=watching):
            return compiler(gm, example_inputs, **options)

    return compile_graph


class ChainedPass(CustomSchedulerPass):
    """A pass over a scheduler's nodes, beside the pass that was set before.

    Args:
        others: The pass that was set before; None if there is none.
    """

    name: ClassVar[str]
    """Identifies the pass in the key of torch's graph cache; the key also contains the sources of this package."""

    def __init__(self, others: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.others = others

    @classmethod
    def behind(cls, others: Any, *more: Any) -> Callable[[list[Any]], list[Any]]:
        """Returns the pass, or a plain function if the pass before it has no identity for torch's graph cache."""
        ours = cls(others, *more)
        return ours if others is None or isinstance(others, CustomSchedulerPass) else ours.__call__

    @abc.abstractmethod
    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes after this pass and `others`."""

    def uuid(self) -> object:
        """Identities of this pass and of `others` in the key of torch's graph cache."""
        return self.name if self.others is None else (self.name, self.others.uuid())  # type: ignore[attr-defined]


class PassBehind(ChainedPass):
    """A pass before any fusion, which runs after the pass that was set before."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes in their new order."""
        before = list(nodes)
        after = self.reorder(nodes if self.others is None else self.others(nodes))
        if after and after != before:
            number_anew(after)
        return after

    @abc.abstractmethod
    def reorder(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes in their new order, given the order that the earlier pass left."""


class Watching(PassBehind):
    """Leaves the nodes as they are, and has `told` called with the graph once its scheduler is finished.

    Args:
        told: None if nobody asks; torch's caches do not distinguish the two cases, as the code is the same.
    """

    name = "compile_remat: watched"

    def __init__(self, others: Callable[[list[Any]], list[Any]] | None = None, told: Told | None = None) -> None:
        super().__init__(others)
        self.told = told

    def reorder(self, nodes: list[Any]) -> list[Any]:
        """Returns the same nodes."""
        if self.told is not None:
            watch(V.graph, self.told)
        return nodes

    def __reduce__(self) -> tuple[Any, ...]:  # a cache key must not hold graphs
        return (Watching, (self.others,))


class PlannedKernels(PassBehind):
    """Moves kernels up to their place in the plan; makes the scheduler call C++ kernels one by one, and build none yet.

    A pass that the user set runs first: it sees the nodes as plain Inductor shows them.  From any order that the user's pass
    leaves, a kernel moves up only if the peak does not rise, so that the budget holds under such a pass.
    """

    name = "compile_remat: kernels moved up"

    def reorder(self, nodes: list[Any]) -> list[Any]:
        """Returns the nodes, moved up."""
        if nodes:
            replace_backends(nodes[0].scheduler)
        drop_waiting_from_users(nodes)
        return move_kernels(nodes)


class MoreFusions(ChainedPass):
    """Fuses kernels that the first pass of `fusion_guard` kept apart, where the graph's peak allows it."""

    name = "compile_remat: fused up to the peak"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Returns the fused kernels; a pass that the user set runs after it, and sees them as the code will have them."""
        nodes = fuse_up_to_peak(nodes)
        return nodes if self.others is None else self.others(nodes)


def number_anew(nodes: list[Any]) -> None:
    """Set the order of a scheduler's nodes and recompute their ancestors: Inductor's fusions and the fusion guard use both."""
    scheduler = nodes[0].scheduler
    scheduler.nodes = nodes
    scheduler.compute_ancestors()
