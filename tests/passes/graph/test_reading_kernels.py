"""The kernels that read a node of a graph that is not planned yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile_remat._torch.codegen_rules import inductor_rules
from compile_remat.passes.graph.reading_kernels import inlined_nodes, kernels_of, readers_of_memory


def graph_of(function: Callable[..., object], *inputs: Tensor) -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph, {node.name: node for node in graph.nodes}


def names(nodes: Iterable[fx.Node]) -> list[str]:
    return sorted(node.name for node in nodes)


def test_a_pointwise_node_is_computed_where_fused_kernels_read_it() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        product = x * w
        return ((product + w) @ w).sum() + (product.t() - w).sum()

    graph, nodes = graph_of(function, torch.ones(8, 8), torch.ones(8, 8))
    inlined = inlined_nodes(graph)
    assert {"mul", "sub"} <= set(names(inlined)) and "add" not in names(inlined)  # a product reads the sum from memory
    assert names(kernels_of([nodes["mul"]], inlined)) == ["add", "mul", "sub", "sum_2", "t"]


def test_what_a_product_reads_is_written_by_the_kernel_that_all_before_it_is_computed_in() -> None:
    """The product reads `exp`, not the `mul` before it: that is computed where `exp` is."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).exp() @ w

    graph, nodes = graph_of(function, torch.ones(8, 8), torch.ones(8, 8))
    assert names(inlined_nodes(graph)) == ["mul"]
    assert "exp" in names(kernels_of([nodes["mul"]], inlined_nodes(graph)))


def test_a_node_that_reads_many_buffers_and_has_several_readers_is_written() -> None:
    def function(*parts: Tensor) -> Tensor:
        whole = parts[0]
        for part in parts[1:]:
            whole = whole + part
        return whole.sin().sum() + whole.cos().sum()

    most = inductor_rules("cpu").max_reads_if_reused
    for num_parts, is_inlined in ((most, True), (most + 1, False)):
        graph, nodes = graph_of(function, *(torch.ones(8) for _ in range(num_parts)))
        assert (nodes["sin"].all_input_nodes[0] in inlined_nodes(graph)) is is_inlined


def test_memory_is_read_through_views_and_copies() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.t() * x.clone()) @ x

    graph, _ = graph_of(function, torch.ones(4, 4))
    (given,) = graph.find_nodes(op="placeholder")
    assert names(readers_of_memory(given)) == ["clone", "mm", "mul", "t"]
