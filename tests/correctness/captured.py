"""The two graphs that a partitioner makes of a function, what its gradients are, and the bytes that Inductor would move."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@dataclass
class Captured:
    """One run of forward and backward under one partitioner.

    Attributes:
        forwards, backwards: The graphs, one of each for every joint graph.
        results: Outputs and gradients.
        num_outputs: Number of `results` that are outputs.
    """

    forwards: list[fx.Graph] = field(default_factory=list)
    backwards: list[fx.Graph] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    num_outputs: int = 0

    @property
    def kernel_bytes(self) -> int:
        """Bytes that the kernels of all graphs read and write, by Inductor's own count after fusion."""
        return sum(_kernel_bytes(graph) for graph in (*self.forwards, *self.backwards))

    def count(self, which: str, operator: Any) -> int:
        """The number of calls of an operator, in any overload, in the forwards or the backwards."""
        graphs = self.forwards if which == "forward" else self.backwards
        return sum(_is_call(node, operator) for graph in graphs for node in graph.nodes)

    def handed_over(self) -> list[fx.Node]:
        """Nodes of the forward that the backward takes as inputs: saved tensors, inputs and sizes, without tangents."""
        (forward,), (backward,) = self.forwards, self.backwards
        taken = {n.name for n in backward.find_nodes(op="placeholder") if not n.name.startswith("tangents")}
        made = {n.name: n for n in forward.nodes}
        return [made[name] for name in made if name in taken]

    def saved(self) -> list[fx.Node]:
        """The nodes of `handed_over` that the forward computes."""
        return [n for n in self.handed_over() if n.op == "call_function"]

    def saved_roots(self) -> list[fx.Node]:
        """Nodes that own the memory of the saved tensors, without inputs and outputs, which are alive anyway."""
        returned = self.forwards[0].output_node().args[0]
        outputs = {root(n) for n in list(returned)[: self.num_outputs] if isinstance(n, fx.Node)}
        roots = dict.fromkeys(root(n) for n in self.saved() if isinstance(n.meta["val"], Tensor))
        return [r for r in roots if r.op == "call_function" and r not in outputs]


def root(node: fx.Node) -> fx.Node:
    """The node that a view is a view of."""
    while getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _is_call(node: fx.Node, operator: Any) -> bool:
    return node.op == "call_function" and getattr(node.target, "overloadpacket", node.target) is operator


def capture(
    function: Callable[..., Any], inputs: Sequence[Tensor], partitioner: Partitioner, *, dynamic: bool | None = None
) -> Captured:
    """Trace, partition, run forward and backward of the sum of all outputs, as they are, without compiling a kernel."""
    seen = Captured()

    def keep(graphs: list[fx.Graph]) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, example_inputs: Any) -> Any:
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep(seen.forwards),
        bw_compiler=keep(seen.backwards),
        partition_fn=partitioner,
        decompositions=select_decomp_table,
    )
    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        seen.results = run(torch.compile(function, backend=backend, dynamic=dynamic), inputs)
    seen.num_outputs = len(seen.results) - sum(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    torch.compiler.reset()
    return seen


def run(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of the inputs that ask for one."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    total = sum(o.sum() for o in outputs if isinstance(o, Tensor) and o.requires_grad)
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return [*(o.detach() for o in outputs if isinstance(o, Tensor)), *(g for g in gradients if g is not None)]


def _kernel_bytes(graph: fx.Graph) -> int:
    """Lower and schedule a copy of the graph; generate no code."""
    module = copy.deepcopy(graph.owning_module)
    inputs = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    mode = detect_fake_mode(inputs)
    assert mode is not None
    lowered = GraphLowering(module, example_inputs=inputs, shape_env=mode.shape_env)
    with DebugContext(), V.set_fake_mode(mode), V.set_graph_handler(lowered):
        lowered.run(*inputs)
        lowered.init_wrapper_code()
        lowered._update_scheduler()
        return int(lowered.count_bytes()[0])
