"""Unrolling: a sliced call becomes calls of a graph that is compiled once (``invoke_subgraph``), which Inductor can compile.

The temporaries of such a call are freed when it ends, so temporaries of two slices are never alive together, in whatever order
the compiler runs the calls.  Sums are added up between the calls, where one buffer can hold a sum before and after; each call is
handed an element of the sums so far, so that it runs when they are there, and no two parts of a sum are alive together.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compile_remat._torch.operators import call
from compile_remat.cost_models import is_view
from compile_remat.passes.graph.rewrites.contract import Rewritten
from compile_remat.passes.graph.slices.bodies import added, converted
from compile_remat.passes.graph.slices.calls import is_sliced, sum_values
from compile_remat.passes.graph.views import fake_mode_of

LAID_OUT = torch.ops.prims.inductor_force_stride_order.default
"""Operator that returns its operand with given strides, so that Inductor writes the operand to memory."""


def unroll_sliced_calls(module: fx.GraphModule) -> Rewritten:
    """Replace each sliced call by one call of its body for each slice, in place; returns how many there were."""
    found = [node for node in module.graph.nodes if is_sliced(node)]
    for node in found:
        with fake_mode_of(node.meta["val"][0]), module.graph.inserting_before(node):
            _Unrolled(module, node).replace()
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return Rewritten(len(found))


class _Unrolled:
    """Replaces one sliced call by one call for each slice."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        self.graph, self.node = module.graph, node
        args: tuple[Any, ...] = node.args
        self.body, self.rest, self.rows, self.length, self.dims, self.joined_dims = args[:6]
        self.operands = list(args[6:])
        body = module.get_submodule(str(self.body.target))
        assert isinstance(body, fx.GraphModule)
        self.values = sum_values(body, len(self.operands))
        self.body_outputs: Any = body.graph.output_node().args[0]
        self.meta = {k: v for k, v in node.meta.items() if k != "val"}

    def replace(self) -> None:
        """Insert the calls in place of the sliced call, and erase it."""
        sources = [x if dim < 0 else self._realized(x) for x, dim in zip(self.operands, self.dims, strict=True)]
        sums = list[fx.Node]()
        joined: list[list[fx.Node]] = [[] for _ in self.joined_dims]
        for start in range(0, self.rows, self.length):
            made = self._slice(sources, sums, start, min(self.length, self.rows - start))
            for pieces, piece in zip(joined, made, strict=False):
                pieces.append(piece)
            parts = made[len(joined) :]
            if sums:
                sums = [added(self._call, total, part) for total, part in zip(sums, parts, strict=True)]
            else:
                sums = [converted(self._call, part, v.dtype) for part, v in zip(parts, self.values, strict=True)]
        whole = [
            parts[0] if len(parts) == 1 else self._call(torch.ops.aten.cat.default, parts, dim)
            for parts, dim in zip(joined, self.joined_dims, strict=True)
        ]
        results = [*whole, *sums]
        for user in list(self.node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)

    def _slice(self, sources: list[fx.Node], sums: list[fx.Node], start: int, length: int) -> list[fx.Node]:
        """Insert the call of one slice; returns its joined outputs, then the parts of the sums."""
        body = self.body if length == self.length or self.rest is None else self.rest
        given = [
            x if dim < 0 else self._call(torch.ops.aten.slice.Tensor, x, dim, start, start + length)
            for x, dim in zip(sources, self.dims, strict=True)
        ]
        tokens = [self._call(torch.ops.aten.as_strided.default, total, [1], [1]) for total in sums] or [
            self._call(torch.ops.aten.full.default, [1], 0, dtype=v.dtype, device=v.device) for v in self.values
        ]
        region = torch.ops.higher_order.invoke_subgraph
        made = self.graph.call_function(region, (body, str(body.target), *given, *tokens))
        values = [self._part(k, length) for k in range(len(self.joined_dims))]
        parts = self.body_outputs[len(values) :]
        made.meta = {**self.meta, "val": (*values, *(part.meta["val"] for part in parts))}
        return [self._call(operator.getitem, made, k) for k in range(len(made.meta["val"]))]

    def _part(self, k: int, length: int) -> Any:
        value = self.node.meta["val"][k]
        sizes = [length if d == self.joined_dims[k] else size for d, size in enumerate(value.shape)]
        return torch.empty(sizes, dtype=value.dtype, device=value.device)

    def _realized(self, node: fx.Node) -> fx.Node:
        """Returns `node` as a tensor that is in memory as a whole; otherwise each slice would be computed by code of its own.

        If the node is a view, its base is written to memory and not the view, so that other readers of the base share the memory.
        """
        views = list[fx.Node]()
        while node.op == "call_function" and is_view(node) and len(node.all_input_nodes) == 1:
            views.append(node)
            node = node.all_input_nodes[0]
        if node.op == "placeholder" or node.target is LAID_OUT:
            return views[0] if views else node
        there = next((user for user in node.users if user.target is LAID_OUT), None)
        if there is not None:
            return views[0] if views else there
        with self.graph.inserting_before(node.next):
            there = self._call(LAID_OUT, node, node.meta["val"].stride())
        for user in [user for user in node.users if user is not there and user.op != "output"]:
            user.replace_input_with(node, there)
        return views[0] if views else there  # the views now read `there`

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = call(self.graph, target, args, kwargs)
        node.meta = {**self.meta, **node.meta}
        return node
