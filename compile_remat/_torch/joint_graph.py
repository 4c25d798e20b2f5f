"""AOTAutograd's joint graph before and after the choice of saved values, by the helpers of torch's own partitioner.

Imports nothing of compile_remat but its siblings and `_util`.  Written against torch 2.13.0; the sources of 2.11.0 and 2.15.0 were
compared line by line, the tests were run on all three, and where they differ the code checks for the feature:

* ``_extract_fwd_bwd_modules`` takes ``saved_opaque_nodes`` from 2.12;
* from 2.13, a SymBool that only assertions read is never saved for the backward;
* 2.14 gives ``fx_graph_cse`` an ``extra_node_key`` so that forward-only values are not merged with values that
  the backward needs.

The pipeline around the choice of saved values (`prepare`, `extract_modules`) is made of torch's own helpers in the
order of ``min_cut_rematerialization_partition``; only the choice itself is not torch's.
"""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config

from compile_remat._torch import input_mutation, sizes
from compile_remat._torch.version import private_module, private_name
from compile_remat._util import max_flow

_PARTITIONERS = "torch._functorch.partitioners"
P = private_module(_PARTITIONERS)  # its helpers are private and change between versions: checked by tests, not by types
is_sym_node = private_name("torch.fx.experimental.proxy_tensor", "is_sym_node")
make_graph_module = private_name("torch.fx._lazy_graph_module", "_make_graph_module")

WRITE = private_name("torch._inductor.inductor_prims", "force_stride_order")
"""The operator by which Inductor itself writes a value to memory in given strides."""

RATIO_KEY = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "_region_activation_memory_budget")
"""Key of ``meta["custom"]`` under which a node holds the ratio of its region; torch writes it from 2.13 on."""


def _takes(function: str, parameter: str) -> bool:
    return parameter in inspect.signature(private_name(_PARTITIONERS, function)).parameters


_HAS_OPAQUE = _takes("_extract_fwd_bwd_modules", "saved_opaque_nodes")
_HAS_CSE_KEY = _takes("fx_graph_cse", "extra_node_key")


def is_saveable_symbol(node: fx.Node) -> bool:
    """Returns whether a node is a SymInt, which can be saved; SymFloats and SymBools cannot (partitioners.py, classify)."""
    return is_sym_node(node) and isinstance(node.meta.get("val"), torch.SymInt)


# -- the joint graph --------------------------------------------------------------------------------------------------


USER_TAGS = (
    P.CheckpointPolicy.MUST_SAVE,
    P.CheckpointPolicy.PREFER_SAVE,
    P.CheckpointPolicy.MUST_RECOMPUTE,
    P.CheckpointPolicy.PREFER_RECOMPUTE,
)
"""The policies that the planner obeys.  The planner ignores offloading to the host, as torch's partitioner does."""


@dataclass(frozen=True)
class ReadableInputs:
    """Names of the inputs that a backward may read.

    Attributes:
        by_all: Inputs that any node may read.
        by_tagged: Inputs that only nodes of the user's checkpointed regions may read, as in plain torch.compile.
    """

    by_all: frozenset[str]
    by_tagged: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All inputs that the backward may read."""
        return self.by_all | self.by_tagged


@dataclass(frozen=True)
class Snapshot:
    """A copy of an input, or of a view of an input, that the backward may read instead.

    Attributes:
        node: The copy; no node of the joint graph reads it.
        source: The input or the view.
        reads: The nodes that read `source`, each with the chain of views from `source` to the operand of the node, both included.
    """

    node: fx.Node
    source: fx.Node
    reads: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...]


@dataclass(frozen=True)
class Joint:
    """A joint graph after torch's own preparation, with its classification.

    Attributes:
        user_tags: Policy of each tagged node, from selective checkpointing or from ``checkpoint`` itself: `must_save`,
            `prefer_save`, `must_recompute` or `prefer_recompute`.
        handed_on: Nodes that one checkpointed region computes and the next one reads.  Torch saves them regardless of their
            own tag, as eager mode does.
        left_alone: Outputs that no plan saves, since the caller may mutate them in place before the backward runs.
        readable: The inputs that the backward of plain torch.compile reads; None if the graph has its backward inside.
        snapshots: Copies of inputs that are not readable.
        described: Cache of `cost_models.describe`: the counts of each node, with the arguments that the node had then.
    """

    module: fx.GraphModule
    num_fwd_outputs: int
    info: Any  # torch._functorch.partitioners.NodeInfo
    fwd_outputs: tuple[fx.Node, ...]
    bwd_outputs: tuple[fx.Node, ...]
    has_recomputable_ops: bool
    has_recomputable_rng_ops: bool
    user_tags: Mapping[fx.Node, str] = field(default_factory=dict)
    handed_on: frozenset[fx.Node] = frozenset()
    left_alone: frozenset[fx.Node] = frozenset()
    readable: ReadableInputs | None = None
    snapshots: tuple[Snapshot, ...] = ()
    described: dict[fx.Node, tuple[object, object, Any]] = field(default_factory=dict)

    def snapshots_for(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Returns the copies of inputs that a node reads if the backward runs the node."""
        return self._snapshots_by_reader.get(node, ())

    @functools.cached_property
    def _snapshots_by_reader(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for snapshot in self.snapshots:
            for reader, _ in snapshot.reads:
                found[reader] = (*found.get(reader, ()), snapshot.node)
        return found

    @property
    def has_backward(self) -> bool:
        """False if no node depends on a tangent: torch's default partition handles such graphs."""
        return len(self.info.required_bw_nodes) > 0


def prepare(
    module: fx.GraphModule, *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] | None = None
) -> Joint:
    """Run torch's steps before the choice of saved values: dead code, names, CSE, tags, classification.  Rewrites `module`."""
    module.graph.eliminate_dead_code()
    if sizes.symbols_of(module.graph):
        number_nodes(module.graph)
    module.graph = _cse(module, num_fwd_outputs) if functorch_config.cse else module.graph  # which recompiles
    recomputable = P.has_recomputable_ops(module)
    recomputable_rng = P.has_recomputable_rng_ops(module)
    asked = {n: n.meta["recompute"] for n in module.graph.nodes if n.meta.get("recompute") is not None}
    if recomputable:
        module = P.cleanup_recompute_tags(module, is_default_partition=False)
    # `cleanup_recompute_tags` saves a node with a backward hook because FSDP needs it: such a node is not in `handed_on`.
    handed_on = frozenset(
        n for n, tag in asked.items() if n.meta["recompute"] != tag and not n.meta.get("has_backward_hook", False)
    )
    if not functorch_config.unsafe_allow_optimization_of_collectives:
        P.force_save_collectives(module)
    P.force_save_effectful_ops(module)
    P.force_save_bw_mutation_src(module)
    static_indices = list(static_lifetime_input_indices or ())
    info = P.classify_nodes(module, static_indices, num_fwd_outputs)
    if input_mutation.keep_overwritten(module, info.tangents_closure):
        info = P.classify_nodes(module, static_indices, num_fwd_outputs)
    forward, backward, *_ = P._extract_fwd_bwd_outputs(module, num_fwd_outputs=num_fwd_outputs)
    return Joint(
        module,
        num_fwd_outputs,
        info,
        tuple(n for n in forward if isinstance(n, fx.Node)),
        tuple(n for n in backward if isinstance(n, fx.Node) and n.op != "output"),
        recomputable,
        recomputable_rng,
        {n: tag.name.lower() for n, tag in asked.items() if n.meta["recompute"] == tag and tag in USER_TAGS},
        handed_on,
    )


def reclassified(joint: Joint, known: Collection[fx.Node]) -> Joint:
    """Returns a joint graph with its nodes classified anew, after code of others has changed it.

    Args:
        known: The nodes that it had before; of other nodes the tags are read, too.
    """
    module, old = joint.module, joint.info
    module.graph.eliminate_dead_code()
    module.recompile()
    info = P.classify_nodes(module, [], joint.num_fwd_outputs)
    info.static_lifetime_input_nodes.update(n for n in info.inputs if n in old.static_lifetime_input_nodes)
    forward, backward, *_ = P._extract_fwd_bwd_outputs(module, num_fwd_outputs=joint.num_fwd_outputs)
    nodes = frozenset(module.graph.nodes)
    asked = {n: n.meta.get("recompute") for n in nodes if n not in known}
    tags = {n: tag for n, tag in joint.user_tags.items() if n in nodes}
    return replace(
        joint,
        info=info,
        fwd_outputs=tuple(n for n in forward if isinstance(n, fx.Node)),
        bwd_outputs=tuple(n for n in backward if isinstance(n, fx.Node) and n.op != "output"),
        user_tags=tags | {n: tag.name.lower() for n, tag in asked.items() if tag in USER_TAGS},
        handed_on=joint.handed_on & nodes,
        left_alone=joint.left_alone & nodes,
    )


def copied_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of the graph with the same nodes, fake values and attributes, for planning to rewrite.

    ``copy.deepcopy`` would also copy the pytree specs of the arguments, each leaf of which then warns that its class is deprecated.
    """
    graph = fx.Graph(tracer_cls=module.graph._tracer_cls)
    old = module.graph.output_node()
    returned = graph.graph_copy(module.graph, {})
    graph.output(returned, type_expr=old.type).meta = copy.copy(old.meta)
    graph.set_codegen(copy.copy(module.graph._codegen))
    return fx.GraphModule(module, graph)


def number_nodes(graph: fx.Graph) -> None:
    """Renumber the nodes of each operator, in the order of the graph; inputs, attributes and the output keep their names.

    Tracing also names comparisons of sizes that no node reads.  Their number depends on the history of the shape environment, so
    the same graph, traced again in one process, would have other names than its plan.
    """
    names = private_name("torch.fx.graph", "_Namespace")()
    graph._graph_namespace = names
    fixed = ("placeholder", "get_attr", "output")
    for node in graph.nodes:
        if node.op in fixed:
            node.name = names.create_name(node.name, node)
    for node in graph.nodes:
        if node.op not in fixed:
            node.name = names.create_name(re.sub(r"(_\d+)+$", "", node.name), node)


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
    """Returns the nodes that torch's own partitioner saves at `budget` (1.0 is its default), inputs and symbols included."""
    mark_distances(joint)
    return list(P.choose_saved_values_set(joint.module.graph, joint.info, memory_budget=budget))


def plain_choice(joint: Joint) -> list[fx.Node]:
    """Returns the nodes of `torch_choice`, faster: `torch_choice` spends most of its time in networkx's max-flow in Python."""
    (found,) = torch_choices(joint, (1.0,))
    return found


def torch_choices(joint: Joint, budgets: Sequence[float]) -> list[list[fx.Node]]:
    """Returns the nodes of `torch_choice` at each budget, faster.

    Runs copies of torch's own functions, in which ``import networkx`` finds `max_flow`, and which solve min-cuts and price nodes
    once for all budgets; torch itself is unchanged.  Torch 2.15 has its own min-cut on networkx's graph: there `torch_choice` runs.
    """
    if hasattr(P, "minimum_cut"):
        return [torch_choice(joint, budget) for budget in budgets]
    mark_distances(joint)
    try:
        choose = _chooser()
        return [list(choose(joint.module.graph, joint.info, memory_budget=budget)) for budget in budgets]
    except (AttributeError, KeyError, TypeError, ValueError, max_flow.NetworkXUnbounded):
        # another version of torch builds its network differently, or handles these errors itself
        return [torch_choice(joint, budget) for budget in budgets]


def _import(name: str, *others: Any) -> Any:
    return max_flow if name == "networkx" else builtins.__import__(name, *others)


def _chooser() -> Any:
    """Returns a copy of torch's ``choose_saved_values_set``, for one graph, with a copy of its module's globals."""
    names = {**vars(P), "__builtins__": {**vars(builtins), "__import__": _import}}
    solve, known = _copied(P.solve_min_cut, names), dict[Any, Any]()

    def solve_once(graph: fx.Graph, info: Any, options: Any, dont_ban: Collection[fx.Node] = ()) -> Any:
        key = astuple(options), frozenset(dont_ban)
        if key not in known:
            known[key] = solve(graph, info, options, dont_ban)
        return known[key]

    names["solve_min_cut"] = solve_once
    names["estimate_runtime"] = functools.cache(P.estimate_runtime)
    return _copied(P.choose_saved_values_set, names)


def _copied(function: Any, names: dict[str, Any]) -> Any:
    """Returns a copy of a function of torch with `names` as its globals."""
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LazyTorch:
    """Stands for the module ``torch``, with graph modules that generate their Python code only when called."""

    fx = types.SimpleNamespace(**{**vars(fx), "GraphModule": make_graph_module})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _reordering() -> Any:
    """Returns a copy of torch's ``reordering_to_mimic_autograd_engine`` that generates no Python code for the backward.

    Inductor reads graphs, not code, and `raise_getitems` generates the code anew.  If lazy graph modules are off, the code is
    generated as in torch.
    """
    return _copied(P.reordering_to_mimic_autograd_engine, {**vars(P), "torch": _LazyTorch()})


def mark_distances(joint: Joint) -> None:
    """Set ``dist_from_bw``, the distance to the backward that torch's partitioner reads, on each node."""
    info = joint.info
    for node in reversed(joint.module.graph.nodes):
        node.dist_from_bw = int(1e9)
        if node.op != "output":
            if not info.is_required_fw(node):
                node.dist_from_bw = 0
            else:
                node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])


def _never(node: fx.Node) -> bool:
    """Stands for a predicate on nodes that this version of torch does not have."""
    return False


def has_symbolic_sizes(joint: Joint) -> bool:
    """Returns whether a node of the graph is a size that a call decides."""
    return any(map(is_sym_node, joint.module.graph.nodes))


def extract_modules(
    joint: Joint, saved: Iterable[fx.Node], rewrite: Callable[[fx.GraphModule], object] | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns the forward and backward modules that save `saved`, less the nodes that the backward does not read.

    Args:
        rewrite: Changes the backward module in place, before its nodes are put in execution order.
    """
    nodes = list(saved)
    is_assertion = getattr(P, "_is_assert_only_symbool", _never)
    symbols = [n for n in nodes if is_sym_node(n) and not is_assertion(n)]
    is_opaque = getattr(P, "is_opaque_node", _never)
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
    if rewrite is not None:
        rewrite(backward)
    backward = _reordering()(backward)
    forward = P.raise_getitems(forward)
    backward = P.raise_getitems(backward)
    forward = P.thread_graphsafe_rng_from_hops(forward, is_backward=False)
    backward = P.thread_graphsafe_rng_from_hops(backward, is_backward=True)
    return forward, backward


def write_to_memory(module: fx.GraphModule, names: Collection[str]) -> int:
    """Have Inductor write the named nodes to memory, in their own strides, at their place; else their readers decide.

    A placeholder is in memory anyway.  Afterwards each name belongs to the inserted node that is written.  A node with a symbolic
    stride is left as it is.  Returns the number of nodes that are written.
    """
    graph, count = module.graph, 0
    for node in [each for each in graph.nodes if each.name in names and each.op != "placeholder"]:
        strides = node.meta["val"].stride()
        if not all(isinstance(stride, int) for stride in strides):
            continue
        with graph.inserting_after(node):
            written = graph.call_function(WRITE, (node, strides))
        node.name, written.name = f"{node.name}__unwritten", node.name
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)
        count += 1
    module.recompile()
    return count


def torch_partition(
    module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns torch's own partition, unchanged: for graphs without a backward and as the last fallback."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]

    indices = list(static_lifetime_input_indices or ())
    modules: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
        module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices
    )
    return modules


def plain_partition(
    module: fx.GraphModule, joint_inputs: Any, **keywords: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Returns `torch_partition` without any memory budget of torch: its annotations are removed from the graph's nodes."""
    for graph in [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in graph.nodes:
            node.meta.pop("memory_budget", None)
            if isinstance(node.meta.get("custom"), dict):
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != RATIO_KEY}
    with functorch_config.patch(activation_memory_budget=1.0):
        return torch_partition(module, joint_inputs, **keywords)


_OF_RUNTIME = ("Philox", "ForwardToken", "BackwardToken", "Tangent")
"""Prefixes of the class names of AOTAutograd's descriptors for inputs that are not the user's tensors."""


def is_state_of_runtime(given: fx.Node) -> bool:
    """Returns whether AOTAutograd's descriptor calls an input a seed, an offset, a token or a tangent."""
    return type(given.meta.get("desc")).__name__.startswith(_OF_RUNTIME)


def mutated_inputs(joint: Joint) -> set[fx.Node]:
    """Returns the inputs that the forward mutates; see `input_mutation`."""
    return input_mutation.mutated_inputs(joint.module)


def may_take_over(node: fx.Node, overwritten: Collection[fx.Node]) -> bool:
    """Returns whether a node's output may share the memory of an overwritten input; see `input_mutation`."""
    return input_mutation.may_take_over(node, overwritten)


def mutated_arguments(joint: Joint) -> frozenset[int] | None:
    """Returns the positions of the arguments that the forward mutates; None if one of these has no position."""
    positions = [getattr(n.meta.get("desc"), "idx", None) for n in mutated_inputs(joint)]
    return None if None in positions else frozenset(int(p) for p in positions if p is not None)


def gradient_nodes(module: fx.GraphModule) -> dict[int, fx.Node]:
    """Returns the output nodes of a joint graph that are gradients of its arguments, by the argument's position."""
    output = next(iter(reversed(module.graph.nodes)))
    found: dict[int, fx.Node] = {}
    for node, desc in zip(output.args[0], output.meta.get("desc") or (), strict=False):
        position = getattr(getattr(desc, "grad_of", None), "idx", None)
        if isinstance(node, fx.Node) and position is not None:
            found[int(position)] = node
    return found


def policy_of(node: fx.Node) -> str | None:
    """Returns `"save"` or `"recompute"` if a MUST_* tag of the user (or of `prepare`) demands it; None for PREFER_* or no tag."""
    policy = node.meta.get("recompute")
    if policy == P.CheckpointPolicy.MUST_SAVE:
        return "save"
    if policy == P.CheckpointPolicy.MUST_RECOMPUTE:
        return "recompute"
    return None


def must_save(joint: Joint, node: fx.Node) -> bool:
    """Returns whether torch's own rules forbid recomputing the node: the node must be in the forward, or `prepare` tagged it."""
    if must_be_in_forward(node):
        return True
    return policy_of(node) == "save" and node not in joint.user_tags and node not in joint.handed_on


def must_be_in_forward(node: fx.Node) -> bool:
    """Returns whether a tag keeps the node out of the backward.  (`must_be_in_backward` puts a node into `tangents_closure`.)"""
    return bool(node.meta.get("partitioner_tag") == "must_be_in_forward")


def forward_only(joint: Joint) -> list[fx.Node]:
    """Returns the nodes that a tag keeps out of the backward and that have readers, views included: they must be saved."""
    return [n for n in joint.module.graph.nodes if must_be_in_forward(n) and n.users]


def region_of(node: fx.Node) -> int | None:
    """Returns the number of the node's checkpointed region, None outside of one; the number differs in each compilation."""
    region: int | None = node.meta.get("ac_graph_id")
    return region


# -- graphs with their backward inside ---------------------------------------------------------------------------------


def has_random_checkpoint(module: fx.GraphModule) -> bool:
    """Returns whether a checkpointed region draws random numbers."""
    return bool(P.has_recomputable_rng_ops(module))


def with_parts_up(module: fx.GraphModule) -> fx.GraphModule:
    """Returns the module with each getitem node directly behind the node whose output it takes."""
    raised: fx.GraphModule = P.raise_getitems(module)
    raised.recompile()
    return raised


def each_expression_once(module: fx.GraphModule) -> fx.GraphModule:
    """Returns the module after common subexpression elimination."""
    return fx.GraphModule(module, P.fx_graph_cse(module.graph))


def without_cse() -> AbstractContextManager[object]:
    """Returns a context in which `prepare` does no common subexpression elimination."""
    context: AbstractContextManager[object] = functorch_config.patch(cse=False)
    return context


# -- torch's own memory budget ----------------------------------------------------------------------------------------


def config_ratio() -> float:
    """Returns ``torch._functorch.config.activation_memory_budget``, which is 1 unless the user set it."""
    return float(functorch_config.activation_memory_budget)


@dataclass(frozen=True)
class Annotated:
    """The ratios that a graph's nodes carry.

    Attributes:
        ratios: Ratios of ``torch.autograd.graph.region_activation_memory_budget`` (from 2.13), ascending; more than one is
            an error of the user's.
        bare: Names of the forward operators that no such region covers.
        legacy: Ratio of the old ``meta["memory_budget"]`` marker; the first one counts, as in torch.
    """

    ratios: tuple[float, ...]
    bare: tuple[str, ...]
    legacy: float | None = None

    @property
    def any(self) -> bool:
        """True if the graph asks for a ratio."""
        return bool(self.ratios) or self.legacy is not None


def annotated_ratios(module: fx.GraphModule, joint: Joint | None = None) -> Annotated:
    """Read the annotations as ``min_cut_rematerialization_partition`` does, nested graphs included.

    Without `joint`, as for Dynamo's graphs, every operator of the outer graph counts as a forward operator.
    """
    ratios, bare, legacy = set[float](), list[str](), None
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    for graph in graphs:
        for node in graph.nodes:
            custom = node.meta.get("custom")
            ratio = custom.get(RATIO_KEY) if isinstance(custom, dict) else None
            in_forward = graph is not module.graph or joint is None or joint.info.is_required_fw(node)
            if ratio is not None:
                ratios.add(float(ratio))
            elif node.op == "call_function" and in_forward:
                bare.append(node.name)
            if legacy is None and graph is module.graph and isinstance(node.meta.get("memory_budget"), float):
                legacy = node.meta["memory_budget"]
    return Annotated(tuple(sorted(ratios)), tuple(bare), legacy)
