"""Every private name of torch that the planner and the partition need, in one place.

Imports nothing of ours.  Written against torch 2.13.0; the sources of 2.11.0 and 2.15.0 were compared line by line, and
where they differ the function says so:

* sizes: ``symbolic_shapes.optimization_hint`` from 2.12, ``size_hint`` in 2.11;
* ``_extract_fwd_bwd_modules`` takes ``saved_opaque_nodes`` from 2.12;
* 2.14 gives ``fx_graph_cse`` an ``extra_node_key`` so that forward-only values are not merged with values that
  the backward needs.

The pipeline around the choice of saved values (`prepare`, `extract_modules`) is made of torch's own helpers in the
order of ``min_cut_rematerialization_partition``; only the choice itself is ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import is_sym_node, py_sym_types

_optimization_hint: Any = getattr(symbolic_shapes, "optimization_hint", None) or getattr(symbolic_shapes, "size_hint")  # noqa: B009
P: Any = partitioners  # its helpers are private and change between versions: checked by tests, not by types
_HAS_OPAQUE = "saved_opaque_nodes" in inspect.signature(P._extract_fwd_bwd_modules).parameters
_HAS_CSE_KEY = "extra_node_key" in inspect.signature(P.fx_graph_cse).parameters

SUPPORTED = ((2, 11), (2, 16))
"""Half-open range of torch versions that this module was written for."""


def torch_version() -> tuple[int, int]:
    """Major and minor version of the torch that runs."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_supported() -> bool:
    """Whether this torch lies in the range that the pipeline was checked against."""
    return SUPPORTED[0] <= torch_version() < SUPPORTED[1]


# -- sizes ------------------------------------------------------------------------------------------------------------


def hint_int(size: int | torch.SymInt, fallback: int = 4096) -> int:
    """The size, or for a symbolic one the value seen first; adds no guard.  Unbacked sizes give `fallback`."""
    if type(size) is int:
        return size
    return int(_optimization_hint(size, fallback=fallback))


def hint_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Shape of a (fake) tensor as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.shape)


def hint_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a (fake) tensor, in elements, as plain ints; adds no guard."""
    return tuple(hint_int(s) for s in tensor.stride())


def storage_nbytes(value: object) -> int:
    """Bytes of the storage that a dense (fake) tensor of this shape and stride occupies; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        return hint_int(value.numel()) * value.dtype.itemsize
    extent = 1
    for size, stride in zip(hint_shape(value), hint_strides(value), strict=True):
        if size == 0:
            return 0
        extent += (size - 1) * stride
    return extent * value.dtype.itemsize


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node's value is a SymInt, SymFloat or SymBool."""
    return "val" in node.meta and isinstance(node.meta["val"], py_sym_types)


def is_saveable_symbol(node: fx.Node) -> bool:
    """SymInts can be handed from forward to backward; SymFloats and SymBools cannot (partitioners.py, classify)."""
    return is_sym_node(node) and isinstance(node.meta.get("val"), torch.SymInt)


# -- the joint graph --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joint:
    """A joint graph after torch's own preparation, with its classification."""

    module: fx.GraphModule
    num_fwd_outputs: int
    info: Any  # torch._functorch.partitioners.NodeInfo
    fwd_outputs: tuple[fx.Node, ...]
    bwd_outputs: tuple[fx.Node, ...]
    has_recomputable_ops: bool
    has_recomputable_rng_ops: bool

    @property
    def has_backward(self) -> bool:
        """False where nothing depends on a tangent: torch's default partition handles such graphs."""
        return len(self.info.required_bw_nodes) > 0

    def hands_over(self, symbol: fx.Node) -> bool:
        """Whether the backward gets the number from the forward: of the symbols only SymInts can be saved."""
        return is_saveable_symbol(symbol) and bool(self.info.is_required_fw(symbol))


def prepare(
    module: fx.GraphModule, *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] | None = None
) -> Joint:
    """Dead code, CSE, tags and classification: torch's steps up to the choice.  Rewrites `module` in place."""
    module.graph.eliminate_dead_code()
    module.recompile()
    if functorch_config.cse:
        module.graph = _cse(module, num_fwd_outputs)
    recomputable = P.has_recomputable_ops(module)
    recomputable_rng = P.has_recomputable_rng_ops(module)
    if recomputable:
        module = P.cleanup_recompute_tags(module, is_default_partition=False)
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        P.force_save_collectives(module)
    P.force_save_effectful_ops(module)
    P.force_save_bw_mutation_src(module)
    info = P.classify_nodes(module, list(static_lifetime_input_indices or ()), num_fwd_outputs)
    forward, backward, *_ = P._extract_fwd_bwd_outputs(module, num_fwd_outputs=num_fwd_outputs)
    return Joint(
        module,
        num_fwd_outputs,
        info,
        tuple(n for n in forward if isinstance(n, fx.Node)),
        tuple(n for n in backward if isinstance(n, fx.Node) and n.op != "output"),
        recomputable,
        recomputable_rng,
    )


def _cse(module: fx.GraphModule, num_fwd_outputs: int) -> fx.Graph:
    graph: fx.Graph
    if not _HAS_CSE_KEY:
        graph = P.fx_graph_cse(module.graph)
        return graph
    _, backward, *_ = P._extract_fwd_bwd_outputs(module, num_fwd_outputs=num_fwd_outputs)
    needed: set[fx.Node] = set()
    stack = [n for n in backward if n is not None and n.op != "output"]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph = P.fx_graph_cse(module.graph, extra_node_key=needed.__contains__)
    return graph


def torch_choice(joint: Joint, budget: float = 1.0) -> list[fx.Node]:
    """The saved values that torch's own chooser takes at `budget` (1.0 is its default), inputs and symbols included."""
    info = joint.info
    for node in reversed(joint.module.graph.nodes):
        node.dist_from_bw = int(1e9)
        if node.op != "output":
            if not info.is_required_fw(node):
                node.dist_from_bw = 0
            else:
                node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])
    return list(P.choose_saved_values_set(joint.module.graph, info, memory_budget=budget))


def extract_modules(joint: Joint, saved: Iterable[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that hand over just `saved` (what the backward does not use is dropped)."""
    nodes = list(saved)
    symbols = [n for n in nodes if is_sym_node(n)]
    is_opaque = getattr(P, "is_opaque_node", lambda node: False)
    opaque = [n for n in nodes if is_opaque(n)]
    tensors = [n for n in nodes if not is_sym_node(n) and not is_opaque(n)]
    extra = {"saved_opaque_nodes": opaque} if _HAS_OPAQUE else {}
    forward, backward = P._extract_fwd_bwd_modules(
        joint.module,
        tensors,
        saved_sym_nodes=symbols,
        num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_input_nodes=joint.info.static_lifetime_input_nodes,
        **extra,
    )
    if joint.has_recomputable_ops and joint.has_recomputable_rng_ops:
        forward, backward = P.functionalize_rng_ops(joint.module, forward, backward, len(symbols))
    backward = P.reordering_to_mimic_autograd_engine(backward)
    forward = P.raise_getitems(forward)
    backward = P.raise_getitems(backward)
    forward = P.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = P.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def torch_partition(
    module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's own partition, untouched: for graphs without a backward and as the last fallback."""
    indices = list(static_lifetime_input_indices or ())
    modules: tuple[fx.GraphModule, fx.GraphModule] = P.min_cut_rematerialization_partition(
        module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices
    )
    return modules


def mutated_inputs(joint: Joint) -> set[fx.Node]:
    """Inputs that the forward mutates: by the outputs' descriptors, and as destination of an ``aten.copy_``."""
    found: set[fx.Node] = set()
    by_name = {n.name: n for n in joint.module.graph.nodes if n.op == "placeholder"}
    by_position = [n for n in joint.module.graph.nodes if n.op == "placeholder"]
    output = next(iter(reversed(joint.module.graph.nodes)))
    for desc in output.meta.get("desc") or ():
        mutated = getattr(desc, "mutated_input", None)
        if mutated is None:
            continue
        for node in by_position:
            if node.meta.get("desc") == mutated:
                found.add(node)
    for node in joint.module.graph.nodes:
        if node.target is torch.ops.aten.copy_.default and isinstance(node.args[0], fx.Node):
            if node.args[0].name in by_name:
                found.add(node.args[0])
    return found


def policy_of(node: fx.Node) -> str | None:
    """`"save"` or `"recompute"` where the user (or `prepare`) demands it by a tag, else None; PREFER_* are no demand."""
    policy = node.meta.get("recompute")
    if policy == P.CheckpointPolicy.MUST_SAVE:
        return "save"
    if policy == P.CheckpointPolicy.MUST_RECOMPUTE:
        return "recompute"
    return None


def calls_regions(module: fx.GraphModule) -> bool:
    """Whether the program has regions that are compiled once and called (``nested_compile_region``).

    A region's forward hands inputs that its backward needs back as outputs.  Inductor (2.13) does not see that they are
    the same memory: plain torch.compile reuses it for a later buffer of that size, and gradients are silently wrong.
    """
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(n.target is torch.ops.higher_order.invoke_subgraph for graph in graphs for n in graph.nodes)


# -- Inductor ---------------------------------------------------------------------------------------------------------


def inductor_option_names() -> tuple[str, ...]:
    """Names of Inductor's own options, as ``torch.compile(options=...)`` accepts them."""
    from torch._inductor import config

    return tuple(sorted(config.get_config_copy()))


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor options behind a ``mode`` of torch.compile; ``None`` and ``"default"`` have none."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def mode_names() -> tuple[str, ...]:
    """The modes that torch.compile knows."""
    from torch._inductor import list_mode_options

    return ("default", *sorted(m for m in list_mode_options() if m != "default"))
