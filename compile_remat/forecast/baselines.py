"""Baselines: common checkpointing schemes as saved sets of one planning problem, each compared with the plan at its peak.

Nothing recomputed; ``torch.utils.checkpoint`` around every layer, or every eighth one; selective checkpointing of every layer
that saves products; torch's own chooser (``activation_memory_budget``) at five budgets.  With a link to the host, also checkpoints
whose inputs wait there, and plain torch.compile with all its saved tensors there.  All run on the same timeline under the same
prices.

A layer is an entry of a module list with at least two products, convolutions or attentions in it.  If such entries are nested, as
the blocks of a U-Net are in its levels, checkpoints around the innermost ones are a baseline of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from compile_remat.cost_models import OpKind, op_kind
from compile_remat.passes import Plan, Planner, Problem
from compile_remat.passes.memory.simulator import Bools
from compile_remat.planning.joint_problem import PreparedGraph

TORCH_BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.1)
"""Budgets of torch's chooser; the first one is its default."""

EVERY = 8
"""One layer of this many is checkpointed in the baseline that does not checkpoint all."""

NOTHING, EACH, INNER = "nothing recomputed", "every layer checkpointed", "every inner block checkpointed"
SOME, PRODUCTS = f"every {EVERY}th layer checkpointed", "selective checkpoint, products saved"
DEFAULT = "torch's chooser, default"
INPUTS_MOVED, ALL_MOVED = "offload every block's input", "offload all"
OF_LAYERS = (EACH, SOME, PRODUCTS)
"""Baselines that need a model with layers."""

HEAVY = frozenset({OpKind.MATMUL, OpKind.CONV, OpKind.ATTENTION})
LEAST_HEAVY = 2

_NUMBER = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Baseline:
    """One baseline and the plan at its peak.

    Attributes:
        name: The scheme, in words.
        peak_bytes: Its region peak.
        time_ns: Estimated time of its step.
        ours: The planner's plan within that peak.
    """

    name: str
    peak_bytes: int
    time_ns: int
    ours: Plan

    @property
    def extra_share(self) -> float:
        """The baseline's extra time as a share of the plan's base."""
        return self.ours.base.share_of(self.time_ns)

    @property
    def advantage_ns(self) -> int:
        """Nanoseconds by which the plan is faster than the baseline; negative if it is slower."""
        return self.time_ns - self.ours.time_ns

    @property
    def advantage(self) -> float:
        """`advantage_ns` as a fraction of the baseline's step time."""
        return self.advantage_ns / max(1, self.time_ns)


def compare(
    planner: Planner,
    baselines: Mapping[str, Bools],
    plain_ns: int | None = None,
    moved: Mapping[str, tuple[Bools, Bools]] | None = None,
) -> list[Baseline]:
    """Returns every baseline with the plan at its peak, from the highest peak to the lowest.

    The planner stops within 1.5 % of the bound; if the baseline's own saved set is faster than the plan found, it is the plan.

    Args:
        plain_ns: Estimated step time of plain torch.compile: the base of extra times, and the time of the baseline `DEFAULT`.
        moved: By name, saved sets and those of their values that wait on the host; a planner without a link ignores them.
    """
    masks = np.stack([mask | planner.pinned for mask in baselines.values()], axis=1)
    batch = planner.simulator.run(masks)
    found = []
    for k, name in enumerate(baselines):
        peak_bytes, time_ns = int(batch.peak[k]), planner.problem.step_time_ns + int(batch.time_ns[k])
        ours = planner.within(peak_bytes)
        if ours.time_ns > time_ns:
            ours = planner.plan_of(masks[:, k], peak_bytes)
        if name == DEFAULT and plain_ns is not None:
            time_ns = plain_ns  # without the pinned values, such as tags that torch does not obey
        found.append(Baseline(name, peak_bytes, time_ns, replace(ours, plain_time_ns=plain_ns)))
    for name, (mask, values) in (moved or {}).items():
        if planner.offload is not None:
            its = planner.offload.moved(mask | planner.pinned, values)
            peak_bytes = its.made.peak_bytes
            time_ns = planner.problem.step_time_ns + planner.fastest_time_ns + its.time_ns
            ours = planner.within(peak_bytes)
            if ours.time_ns > time_ns or not ours.is_feasible:
                ours = planner.offload.described(its, peak_bytes, peak_bytes)
            found.append(Baseline(name, peak_bytes, time_ns, replace(ours, plain_time_ns=plain_ns)))
    return sorted(found, key=lambda c: -c.peak_bytes)


def hand_written(problem: Problem, graph: fx.Graph) -> dict[str, Bools]:
    """Returns the saved sets of hand-written checkpointing, by name; checkpoints of layers only if the model has layers."""
    kinds = {node.name: _kind(node) for node in graph.nodes if node.op == "call_function"}
    layers = layers_of(problem, kinds)
    keepable = np.array([v.is_saveable and v.in_forward for v in problem.values], dtype=bool)
    found = {NOTHING: keepable}
    chosen = sorted({layer for layer in layers if layer is not None}, key=_in_order)
    if chosen:
        numbers: Counter[str] = Counter()
        some = set()
        for layer in chosen:
            parent = layer.rpartition(".")[0]
            some |= {layer} if numbers[parent] % EVERY == 0 else set()
            numbers[parent] += 1
        heavy = np.array([kinds.get(v.name) in HEAVY for v in problem.values], dtype=bool)
        inside = _inside(problem, layers, set(chosen))
        found[EACH] = keepable & ~inside
        found[SOME] = keepable & ~_inside(problem, layers, some)
        found[PRODUCTS] = keepable & (~inside | heavy)
        inner = inner_blocks_of(problem, kinds)
        if inner != layers:
            found[INNER] = keepable & ~_inside(problem, inner, {block for block in inner if block is not None})
    return found


def offloading(problem: Problem, graph: fx.Graph, baselines: Mapping[str, Bools]) -> dict[str, tuple[Bools, Bools]]:
    """Returns, by name, the saved sets of baselines whose tensors wait on the host, and the values that do.

    Args:
        baselines: The saved sets of `hand_written` and `saved_by_torch`.
    """
    found = {}
    if EACH in baselines:
        layers = layers_of(problem, {node.name: _kind(node) for node in graph.nodes if node.op == "call_function"})
        inputs = np.zeros(len(problem.values), dtype=bool)
        for w, value in enumerate(problem.values):
            if value.in_forward and layers[w] is not None:
                inputs[[v for v in value.reads if layers[v] != layers[w]]] = True
        found[INPUTS_MOVED] = baselines[EACH], inputs
    if DEFAULT in baselines:
        found[ALL_MOVED] = baselines[DEFAULT], np.ones(len(problem.values), dtype=bool)
    return found


def saved_by_torch(prepared: PreparedGraph, budgets: Sequence[float] = TORCH_BUDGETS) -> dict[str, Bools]:
    """Returns the saved sets of torch's chooser, by name.

    Args:
        prepared: A graph in whose context `budgets` were the `torch_budgets`.
    """
    names = [DEFAULT if b == 1 else f"torch's chooser, budget {b:g}" for b in budgets]
    problem, builder = prepared.problem, prepared.builder
    found = (builder.saved_by(nodes, problem) for nodes in prepared.torch_sets)
    return {name: mask_of(problem, indices) for name, indices in zip(names, found, strict=True)}


def mask_of(problem: Problem, indices: Sequence[int]) -> Bools:
    """Returns the mask, over all values of the problem, that saves the values of these indices."""
    mask = np.zeros(len(problem.values), dtype=bool)
    mask[list(indices)] = True
    return mask


def layers_of(problem: Problem, kinds: Mapping[str, OpKind]) -> list[str | None]:
    """Returns the path of the outermost layer that each value lies in; None outside of all layers."""
    return [entries[0] if entries else None for entries in _heavy_entries(problem, kinds)]


def inner_blocks_of(problem: Problem, kinds: Mapping[str, OpKind]) -> list[str | None]:
    """Returns the path of the innermost layer that each value lies in, as a block of a U-Net, not its level.

    None outside of all layers, and for a value whose innermost layer has other layers in it.
    """
    heavy_entries = _heavy_entries(problem, kinds)
    outer = {entry for entries in heavy_entries for entry in entries[:-1]}
    return [entries[-1] if entries and entries[-1] not in outer else None for entries in heavy_entries]


def _heavy_entries(problem: Problem, kinds: Mapping[str, OpKind]) -> list[list[str]]:
    """Returns the module-list entries with at least `LEAST_HEAVY` heavy values that each value lies in, the outermost first."""
    entries = [_entries_of(v.origin.module_path) for v in problem.values]
    pairs = zip(problem.values, entries, strict=True)
    heavy = Counter(e for v, found in pairs if v.in_forward and kinds.get(v.name) in HEAVY for e in found)
    return [[e for e in found if heavy[e] >= LEAST_HEAVY] for found in entries]


def _entries_of(path: str) -> list[str]:
    """Returns the prefixes of a path that end in a number: ``model.layers.3`` of ``model.layers.3.mlp.up``; the longest last."""
    return [path[: found.end()] for found in _NUMBER.finditer(path)]


def _in_order(layer: str) -> tuple[str, int]:
    parent, _, number = layer.rpartition(".")
    return parent, int(number)


def _inside(problem: Problem, layers: Sequence[str | None], chosen: set[str]) -> Bools:
    """Returns the mask of values in the chosen layers that only their own layer reads: a checkpoint around it frees them."""
    crosses = np.array([layer not in chosen for layer in layers], dtype=bool)
    for w, value in enumerate(problem.values):
        if value.in_forward:
            for v in value.reads:
                crosses[v] |= layers[v] != layers[w]
    return np.asarray(~crosses)


def _kind(node: fx.Node) -> OpKind:
    """Returns the kind of a node; a getitem has the kind of the node whose output it takes."""
    kind = op_kind(node)
    return op_kind(node.all_input_nodes[0]) if kind is OpKind.ITEM else kind
