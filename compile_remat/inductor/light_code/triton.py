"""Inductor's Triton backend without kernel code.

Private names of ``torch._inductor.codegen``, same in 2.11 to 2.15: ``triton.TritonScheduling``, ``.TritonKernel``;
``simd.DisableReduction``, ``.EnableReduction``; ``simd_kernel_features.SIMDKernelFeatures``; ``InductorChoices``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch._inductor import config

from compile_remat._torch.version import private_name
from compile_remat.inductor.light_code.kernels import (
    LOADS,
    STORES,
    Kernels,
    LightKernel,
    accessed,
    call_kernel,
    name_kernel,
)
from compile_remat.inductor.light_code.loop_bodies import give_own_bodies, nodes_in

if TYPE_CHECKING:
    from torch._inductor.codegen.triton import TritonKernel, TritonScheduling
else:
    TritonKernel = private_name("torch._inductor.codegen.triton", "TritonKernel")
    TritonScheduling = private_name("torch._inductor.codegen.triton", "TritonScheduling")
SIMDKernelFeatures = private_name("torch._inductor.codegen.simd_kernel_features", "SIMDKernelFeatures")
DisableReduction = private_name("torch._inductor.codegen.simd", "DisableReduction")
EnableReduction = private_name("torch._inductor.codegen.simd", "EnableReduction")
InductorChoices = private_name("torch._inductor.choices", "InductorChoices")
V = private_name("torch._inductor.virtualized", "V")

OWN_CODE = ("scan", "sort", "dot")
"""Operations whose kernels take workspaces or have another form: such kernels go through Inductor's own code."""

NOT_FRESH = ("load", "constant", "index_expr", "value_expr", "getitem")
"""Operations whose value may exist before the loop that stores it; Inductor forgets other stored values at the loop's end."""

SAME_VALUE = ("to_dtype", "to_dtype_bitcast", "identity")
"""Operations that may return the value that they are given."""

TIMED = ("triton.mix_order_reduction_autotune_split_size", "max_autotune", "coordinate_descent_tuning")
"""Options under which Inductor, while it makes code, times several numbers of parts of a reduction in two directions."""


class TextlessKernel(TritonKernel):
    """A Triton kernel that Inductor makes as usual, except for its code text."""

    def codegen_kernel(self, name: str | None = None) -> str:
        """Returns no text; sets the metadata that Inductor reads when it writes the kernel's call."""
        self.triton_meta: dict[str, Any] = {}
        self.inductor_meta: dict[str, Any] = {}
        return ""


class LightTriton(TritonScheduling):
    """Inductor's Triton backend, without the text of kernels; nothing is compiled or timed.

    Kernels of pointwise operations and of reductions in one piece are made from their arguments only.  Templates, kernels that
    share a launch and reductions in two directions go through Inductor's own code.

    Args:
        kernels: Receives the name of each kernel and the nodes that it runs.
    """

    kernel_type = TextlessKernel

    def __init__(self, scheduler: Any, kernels: Kernels) -> None:
        super().__init__(scheduler)
        self.kernels = kernels

    def codegen_node(self, node: Any) -> None:
        """Decide about the buffers of one fused kernel; only Inductor's own code analyses the layout of its memory accesses."""
        nodes = [part for part in node.get_nodes() if part.get_name() not in V.graph.scheduler.removed_ops]
        if not nodes:
            return
        _, (numel, reduced) = max(nodes, key=lambda part: int(part.is_reduction())).group
        features = SIMDKernelFeatures(self.generate_node_schedule(nodes, numel, reduced), numel, reduced)  # type: ignore[no-untyped-call]
        if not self._made_light(features):
            give_own_bodies(nodes)
            super().codegen_node(node)

    def codegen_node_schedule(self, kernel_features: Any) -> None:
        """Decide about the buffers of one kernel."""
        if not self._made_light(kernel_features):
            give_own_bodies(kernel_features.scheduler_nodes())
            super().codegen_node_schedule(kernel_features)

    def _made_light(self, features: Any) -> bool:
        """Make a kernel from its arguments only; returns False if its accesses do not determine them."""
        kept = read_back(features)
        if kept is None:
            return False
        nodes = list(features.scheduler_nodes())
        kernel = LightKernel()
        kernel.take_in_at_once(nodes, kept)
        call_kernel(self.kernels, nodes, kernel.args, ".run")
        kernel.tell_graph()
        self.free_buffers_in_scheduler()
        return True

    def codegen_template(self, *args: Any, **kwargs: Any) -> Any:
        """Make a kernel from a template and the nodes that are fused with it."""
        give_own_bodies(nodes_in(args, list(kwargs.values())))
        return super().codegen_template(*args, **kwargs)

    def codegen_combo_kernel(self, combo_kernel_node: Any) -> None:
        """Make kernels that share a launch."""
        give_own_bodies(nodes_in(combo_kernel_node))
        super().codegen_combo_kernel(combo_kernel_node)  # type: ignore[no-untyped-call]

    def codegen_mix_order_reduction(self, node: Any) -> None:
        """Make reductions in two directions, without timing numbers of parts."""
        give_own_bodies(nodes_in(node))
        with config.patch(dict.fromkeys(TIMED, False)):
            super().codegen_mix_order_reduction(node)  # type: ignore[no-untyped-call]

    def codegen_nested_reduction(self, node: Any) -> None:
        """Make reductions of reductions, in 2.13 and 2.14."""
        give_own_bodies(nodes_in(node))
        super().codegen_nested_reduction(node)  # type: ignore[no-untyped-call]

    def codegen_staged_reduction(self, node: Any) -> None:
        """Make reductions of reductions, from 2.15 on."""
        give_own_bodies(nodes_in(node))
        super().codegen_staged_reduction(node)  # type: ignore[misc]

    def define_kernel(self, src_code: str, node_schedule: list[Any], kernel: Any) -> str:
        """Define a kernel's name in the wrapper, without code, and return the name."""
        return name_kernel(self.kernels, [node for node in node_schedule if hasattr(node, "read_writes")])

    def codegen_comment(self, *args: Any, **kwargs: Any) -> None:
        """Write no comment: comments name the origins of all nodes."""


def read_back(features: Any) -> set[str] | None:
    """The buffers that a kernel writes in one loop and reads from memory in another; None if its accesses do not tell.

    Inductor keeps a stored value until its load, except for a value that a loop stores, which is gone at the end of the loop.
    A loop ends where a reduction is closed, unless the reduction fits into one block.
    """
    if has_form_of_its_own(features):
        return None
    gone: dict[str, Any] = {}
    waiting: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for node, is_inside in loops_of(features.node_schedule):
        if node is None:
            gone |= waiting
            waiting.clear()
            continue
        found |= {name: gone[name] for name in accessed(node, LOADS) if name in gone}
        if is_inside:
            waiting |= dict.fromkeys(accessed(node, STORES[:1]), node)
    if not found or is_in_one_block(features):
        return set()
    return set(found) if all(is_fresh(name, node) for name, node in found.items()) else None


def loops_of(schedule: list[Any]) -> Iterator[tuple[Any, bool]]:
    """Yields each node of a schedule, with True if the node is inside of a loop; ``(None, False)`` where a loop ends."""
    is_inside = True
    for entry in schedule:
        if entry is EnableReduction:
            is_inside = True
        elif entry is DisableReduction:
            is_inside = False
            yield None, False
        else:
            yield entry, is_inside


def has_form_of_its_own(features: Any) -> bool:
    """True if the kernel may need more than its accesses tell: workspaces, or a choice between several forms."""
    options = config.triton
    if not features.is_reduction():
        return False
    has_choices = options.multi_kernel or options.cooperative_reductions or options.force_cooperative_reductions
    has_hook = type(V.choices).triton_kernel_kwargs is not InductorChoices.triton_kernel_kwargs
    return bool(has_choices or has_hook or any(features.contains_op(name) for name in OWN_CODE))


def is_in_one_block(features: Any) -> bool:
    """True if a reduction has no loop, by Inductor's rules."""
    if not TritonKernel.has_persistent_RBLOCK(features.reduction_numel):
        return False
    options: dict[str, Any] = {}
    if hasattr(
        TritonKernel, "apply_feature_required_overrides"
    ):  # before 2.13 all of it stands above, or in `OWN_CODE`
        TritonKernel.apply_feature_required_overrides(features, options)
    is_one = options.get("override_persistent_reduction")
    return bool(V.choices.should_use_persistent_reduction(features, False) if is_one is None else is_one)


def is_fresh(name: str, node: Any) -> bool:
    """True if a node computes the value that it stores in buffer `name`, so that Inductor has no other variable for the value."""
    blocks = [node._body.root_block, *node._body.subblocks.values()]
    stores = [each for block in blocks for each in block.graph.find_nodes(op="call_method", target="store")]
    values = [store.args[3] for store in stores if store.args[1] == name]
    return bool(values) and all(_source(value) not in NOT_FRESH for value in values)


def _source(value: Any) -> str:
    """Name of the operation that computes a value of a loop body; `SAME_VALUE` operations are skipped."""
    while value.target in SAME_VALUE:
        value = value.args[1]
    return str(getattr(value.target, "__name__", value.target))
