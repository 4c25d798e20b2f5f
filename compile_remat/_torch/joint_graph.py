"""AOTAutograd's joint graph before and after the choice of saved values, by the helpers of torch's own partitioner.

Imports nothing of ours but its siblings and `_util`.  Written against torch 2.13.0; the sources of 2.11.0 and 2.15.0 were compared
line by line, the tests were run on all three, and where they differ the code asks for the feature:

* ``_extract_fwd_bwd_modules`` takes ``saved_opaque_nodes`` from 2.12;
* from 2.13, a SymBool that only assertions read is never handed over;
* 2.14 gives ``fx_graph_cse`` an ``extra_node_key`` so that forward-only values are not merged with values that
  the backward needs.

The pipeline around the choice of saved values (`prepare`, `extract_modules`) is made of torch's own helpers in the
order of ``min_cut_rematerialization_partition``; only the choice itself is ours.
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
from dataclasses import astuple, dataclass, field
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
py_sym_types = private_name("torch.fx.experimental.proxy_tensor", "py_sym_types")
make_graph_module = private_name("torch.fx._lazy_graph_module", "_make_graph_module")

WRITE = private_name("torch._inductor.inductor_prims", "force_stride_order")
"""The operator by which Inductor itself has a value written in an order of its dimensions."""

RATIO_KEY = getattr(torch.fx.traceback, "MEMORY_BUDGET_ANNOTATION_KEY", "_region_activation_memory_budget")
"""Where a node's ``meta["custom"]`` holds the ratio of its region; nothing writes it before 2.13."""


def _takes(function: str, parameter: str) -> bool:
    return parameter in inspect.signature(private_name(_PARTITIONERS, function)).parameters


_HAS_OPAQUE = _takes("_extract_fwd_bwd_modules", "saved_opaque_nodes")
_HAS_CSE_KEY = _takes("fx_graph_cse", "extra_node_key")


def is_saveable_symbol(node: fx.Node) -> bool:
    """SymInts can be handed from forward to backward; SymFloats and SymBools cannot (partitioners.py, classify)."""
    return is_sym_node(node) and isinstance(node.meta.get("val"), torch.SymInt)


# -- the joint graph --------------------------------------------------------------------------------------------------


USER_TAGS = (
    P.CheckpointPolicy.MUST_SAVE,
    P.CheckpointPolicy.PREFER_SAVE,
    P.CheckpointPolicy.MUST_RECOMPUTE,
    P.CheckpointPolicy.PREFER_RECOMPUTE,
)
"""The policies that we obey.  Offloading to the host is none of them: torch's partitioner ignores it as well."""


@dataclass(frozen=True)
class ReadableInputs:
    """Names of the inputs that a backward may read.

    Attributes:
        by_all: Those that any node may read.
        by_tagged: Those that only nodes of the user's checkpointed regions may read, as in plain torch.compile.
    """

    by_all: frozenset[str]
    by_tagged: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.by_all | self.by_tagged


@dataclass(frozen=True)
class Snapshot:
    """A copy of an input, or of a view of it, that the backward may read in its place.

    Attributes:
        node: The copy; nothing in the joint graph reads it.
        source: The input or the view.
        reads: The nodes that read it, each with the views from `source` to what the node reads, both included.
    """

    node: fx.Node
    source: fx.Node
    reads: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...]


@dataclass(frozen=True)
class Joint:
    """A joint graph after torch's own preparation, with its classification.

    Attributes:
        user_tags: What a policy of selective checkpointing, or ``checkpoint`` itself, asks of a node: `must_save`,
            `prefer_save`, `must_recompute` or `prefer_recompute`.
        handed_on: Nodes that one checkpointed region computes and the next one reads: torch keeps them, as eager mode
            does, whatever their own tag says.
        left_alone: Outputs that no plan saves, since the caller may change them in place before the backward runs.
        readable: The inputs that the backward of plain torch.compile reads; None where the graph has its backward inside.
        snapshots: Copies of the others.
        described: What was counted of each node (`cost_models.describe`), with the arguments that it had then.
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
        """The copies of inputs that a node reads where the backward runs it."""
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
        """False where nothing depends on a tangent: torch's default partition handles such graphs."""
        return len(self.info.required_bw_nodes) > 0


def prepare(
    module: fx.GraphModule, *, num_fwd_outputs: int, static_lifetime_input_indices: Sequence[int] | None = None
) -> Joint:
    """Dead code, names, CSE, tags and classification: torch's steps up to the choice.  Rewrites `module` in place."""
    module.graph.eliminate_dead_code()
    if sizes.symbols_of(module.graph):
        number_nodes(module.graph)
    module.graph = _cse(module, num_fwd_outputs) if functorch_config.cse else module.graph  # which recompiles
    recomputable = P.has_recomputable_ops(module)
    recomputable_rng = P.has_recomputable_rng_ops(module)
    asked = {n: n.meta["recompute"] for n in module.graph.nodes if n.meta.get("recompute") is not None}
    if recomputable:
        module = P.cleanup_recompute_tags(module, is_default_partition=False)
    # A node with a backward hook is saved for FSDP's sake (see `cleanup_recompute_tags`): that is no mere convenience.
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


def copied_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes, fake values and attributes: planning rewrites graphs.

    Not by ``copy.deepcopy``: it copies the trees of the arguments, too, each leaf of which then warns that its class is deprecated.
    """
    graph = fx.Graph(tracer_cls=module.graph._tracer_cls)
    old = module.graph.output_node()
    returned = graph.graph_copy(module.graph, {})
    graph.output(returned, type_expr=old.type).meta = copy.copy(old.meta)
    graph.set_codegen(copy.copy(module.graph._codegen))
    return fx.GraphModule(module, graph)


def number_nodes(graph: fx.Graph) -> None:
    """Number nodes of one operator anew, in the order of the graph; its inputs keep their names.

    Tracing names comparisons of sizes, too, which nothing reads.  How many there are depends on what the shape environment has
    seen, so that the same graph, traced again in one process, had other names than its plan.
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
    """The saved values that torch's own chooser takes at `budget` (1.0 is its default), inputs and symbols included."""
    mark_distances(joint)
    return list(P.choose_saved_values_set(joint.module.graph, joint.info, memory_budget=budget))


def plain_choice(joint: Joint) -> list[fx.Node]:
    """The nodes of `torch_choice`, found faster: networkx's max-flow in Python takes most of its time."""
    (found,) = torch_choices(joint, (1.0,))
    return found


def torch_choices(joint: Joint, budgets: Sequence[float]) -> list[list[fx.Node]]:
    """The nodes of `torch_choice` at each budget, found faster.

    A copy of torch's own functions runs, in which ``import networkx`` finds `max_flow`, and which cuts and prices nodes once for
    all budgets; torch itself is left alone.  Torch 2.15 has a cut of its own, which reads networkx's graph.
    """
    if hasattr(P, "minimum_cut"):
        return [torch_choice(joint, budget) for budget in budgets]
    mark_distances(joint)
    try:
        choose = _chooser()
        return [list(choose(joint.module.graph, joint.info, memory_budget=budget)) for budget in budgets]
    except (AttributeError, KeyError, TypeError, ValueError, max_flow.NetworkXUnbounded):
        # another torch builds its network otherwise, or says what is wrong with it
        return [torch_choice(joint, budget) for budget in budgets]


def _import(name: str, *others: Any) -> Any:
    return max_flow if name == "networkx" else builtins.__import__(name, *others)


def _chooser() -> Any:
    """A copy of torch's ``choose_saved_values_set``, for one graph, among copied names of its module."""
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
    """A copy of one of torch's functions that finds these global names."""
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _LazyTorch:
    """Stands for the module ``torch``, whose new graph modules generate their Python code only if somebody runs them."""

    fx = types.SimpleNamespace(**{**vars(fx), "GraphModule": make_graph_module})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _reordering() -> Any:
    """A copy of torch's ``reordering_to_mimic_autograd_engine`` that generates no code of the backward.

    Inductor reads graphs, not code, and `raise_getitems` has the code generated anew.  Where the caller asks for no lazy modules,
    it is generated as in torch.
    """
    return _copied(P.reordering_to_mimic_autograd_engine, {**vars(P), "torch": _LazyTorch()})


def mark_distances(joint: Joint) -> None:
    """Write what torch's chooser reads on each node: how far it is from the backward."""
    info = joint.info
    for node in reversed(joint.module.graph.nodes):
        node.dist_from_bw = int(1e9)
        if node.op != "output":
            if not info.is_required_fw(node):
                node.dist_from_bw = 0
            else:
                node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])


def _never(node: fx.Node) -> bool:
    """Stands for a test of nodes that this version of torch does not know."""
    return False


def extract_modules(
    joint: Joint, saved: Iterable[fx.Node], rewrite: Callable[[fx.GraphModule], None] | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that hand over just `saved` (what the backward does not use is dropped).

    Args:
        rewrite: Changes the backward module in place, before it is put in the order in which it runs.
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


def write_to_memory(module: fx.GraphModule, names: Collection[str]) -> None:
    """Have Inductor write the named nodes to memory, in their own strides, where it meets them; it decides by their readers else.

    A name belongs to what is written, afterwards.  A node with a stride that is no number stays as it is.
    """
    if not names:
        return
    graph = module.graph
    for node in [each for each in graph.nodes if each.name in names]:
        strides = node.meta["val"].stride()
        if not all(isinstance(stride, int) for stride in strides):
            continue
        with graph.inserting_after(node):
            written = graph.call_function(WRITE, (node, strides))
        node.name, written.name = f"{node.name}__unwritten", node.name
        written.meta = dict(node.meta)
        node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)
    module.recompile()


def torch_partition(
    module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Torch's own partition, untouched: for graphs without a backward and as the last fallback."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]

    indices = list(static_lifetime_input_indices or ())
    modules: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
        module, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=indices
    )
    return modules


def plain_partition(
    module: fx.GraphModule, joint_inputs: Any, **keywords: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The same as if no memory budget of torch's were set, for the process or in the graph, from which its marks are taken."""
    for graph in [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in graph.nodes:
            node.meta.pop("memory_budget", None)
            if isinstance(node.meta.get("custom"), dict):
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != RATIO_KEY}
    with functorch_config.patch(activation_memory_budget=1.0):
        return torch_partition(module, joint_inputs, **keywords)


_OF_RUNTIME = ("Philox", "ForwardToken", "BackwardToken", "Tangent")
"""How names of AOTAutograd's descriptors begin of inputs that are no tensors of the user's."""


def is_state_of_runtime(given: fx.Node) -> bool:
    """Returns whether an input is a seed, an offset, a token or a tangent, by AOTAutograd's descriptor."""
    return type(given.meta.get("desc")).__name__.startswith(_OF_RUNTIME)


def mutated_inputs(joint: Joint) -> set[fx.Node]:
    """Inputs that the forward mutates; see `input_mutation`."""
    return input_mutation.mutated_inputs(joint.module)


def may_take_over(node: fx.Node, overwritten: Collection[fx.Node]) -> bool:
    """Whether a value may lie in the memory of an overwritten input; see `input_mutation`."""
    return input_mutation.may_take_over(node, overwritten)


def mutated_arguments(joint: Joint) -> frozenset[int] | None:
    """Positions of the arguments that the forward writes into; None where one of them is no plain argument."""
    positions = [getattr(n.meta.get("desc"), "idx", None) for n in mutated_inputs(joint)]
    return None if None in positions else frozenset(int(p) for p in positions if p is not None)


def gradient_nodes(module: fx.GraphModule) -> dict[int, fx.Node]:
    """The nodes of a joint graph that are gradients of its arguments, by the argument's position."""
    output = next(iter(reversed(module.graph.nodes)))
    found: dict[int, fx.Node] = {}
    for node, desc in zip(output.args[0], output.meta.get("desc") or (), strict=False):
        position = getattr(getattr(desc, "grad_of", None), "idx", None)
        if isinstance(node, fx.Node) and position is not None:
            found[int(position)] = node
    return found


def policy_of(node: fx.Node) -> str | None:
    """`"save"` or `"recompute"` where the user (or `prepare`) demands it by a tag, else None; PREFER_* are no demand."""
    policy = node.meta.get("recompute")
    if policy == P.CheckpointPolicy.MUST_SAVE:
        return "save"
    if policy == P.CheckpointPolicy.MUST_RECOMPUTE:
        return "recompute"
    return None


def must_save(joint: Joint, node: fx.Node) -> bool:
    """Whether torch's own rules keep the node from a second run: it must be in the forward, or `prepare` tagged it."""
    if must_be_in_forward(node):
        return True
    return policy_of(node) == "save" and node not in joint.user_tags and node not in joint.handed_on


def must_be_in_forward(node: fx.Node) -> bool:
    """Whether a tag keeps the node out of the backward.  (`must_be_in_backward` puts it into `tangents_closure`.)"""
    return bool(node.meta.get("partitioner_tag") == "must_be_in_forward")


def forward_only(joint: Joint) -> list[fx.Node]:
    """What a tag keeps out of the backward and may be read there, views included: it has to be handed over."""
    return [n for n in joint.module.graph.nodes if must_be_in_forward(n) and n.users]


def region_of(node: fx.Node) -> int | None:
    """Which checkpointed region the node belongs to; the number is this process's and changes with every compilation."""
    region: int | None = node.meta.get("ac_graph_id")
    return region


# -- graphs with their backward inside ---------------------------------------------------------------------------------


def has_random_checkpoint(module: fx.GraphModule) -> bool:
    """Whether a checkpointed region draws random numbers."""
    return bool(P.has_recomputable_rng_ops(module))


def with_parts_up(module: fx.GraphModule) -> fx.GraphModule:
    """The module with each part of a node with several outputs right behind it."""
    raised: fx.GraphModule = P.raise_getitems(module)
    raised.recompile()
    return raised


def each_expression_once(module: fx.GraphModule) -> fx.GraphModule:
    """The module with no expression computed twice."""
    return fx.GraphModule(module, P.fx_graph_cse(module.graph))


def without_cse() -> AbstractContextManager[object]:
    """Inside, `prepare` leaves expressions that are computed twice as they are."""
    context: AbstractContextManager[object] = functorch_config.patch(cse=False)
    return context


# -- torch's own memory budget ----------------------------------------------------------------------------------------


def config_ratio() -> float:
    """``torch._functorch.config.activation_memory_budget``: 1 unless somebody set it."""
    return float(functorch_config.activation_memory_budget)


@dataclass(frozen=True)
class Annotated:
    """The ratios that a graph's nodes carry.

    Attributes:
        ratios: Of ``torch.autograd.graph.region_activation_memory_budget`` (from 2.13), ascending; more than one is
            an error of the user's.
        bare: Names of the forward operators that no such region covers.
        legacy: Of the old ``meta["memory_budget"]`` marker; the first one counts, as in torch.
    """

    ratios: tuple[float, ...]
    bare: tuple[str, ...]
    legacy: float | None = None

    @property
    def any(self) -> bool:
        """Whether the graph asks for a ratio at all."""
        return bool(self.ratios) or self.legacy is not None


def annotated_ratios(module: fx.GraphModule, joint: Joint | None = None) -> Annotated:
    """Read the annotations as ``min_cut_rematerialization_partition`` does, nested graphs included.

    Without `joint`, every operator of the outer graph counts as one of the forward: for Dynamo's graphs.
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
