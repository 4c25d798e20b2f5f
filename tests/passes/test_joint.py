"""The graphs of `tests/passes/joint.py`: that of the backend is the one that a pass of the user gets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from compile_remat.backend import remat
from tests.passes.joint import Traced, check_rewrite, joint_in_backend, joint_of, text

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("fresh")


def layer(x: Tensor, w: Tensor) -> Tensor:
    """Of these two operators, the backend's decompositions leave neither."""
    return F.dropout(F.silu(F.linear(x, w)), 0.1, training=True)


def arguments() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)


def has(traced: Traced, target: object) -> bool:
    return bool(traced.module.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_graph_is_the_one_that_a_pass_gets(compiler: str) -> None:
    seen = list[str]()

    def look(graph: fx.Graph) -> None:
        seen.append(text(graph))
        raise StopIteration

    given = arguments()
    traced = joint_in_backend(layer, *given, compiler=compiler)
    options = {"memory_budget": "min", "compiler": compiler, "joint_passes": look}
    torch.compiler.reset()
    with pytest.raises(Exception, match="look failed: StopIteration"):
        torch.compile(layer, backend=remat, options=options)(*given)
    assert seen == [text(traced.module.graph)]


def test_the_backend_decomposes_what_core_aten_keeps() -> None:
    kept, decomposed = joint_of(layer, *arguments()), joint_in_backend(layer, *arguments())
    assert has(kept, aten.native_dropout.default) and not has(decomposed, aten.native_dropout.default)
    assert num_forward_sigmoids(kept) == 1 and num_forward_sigmoids(decomposed) == 0


def num_forward_sigmoids(traced: Traced) -> int:
    """Sigmoids before the first node that reads a tangent."""
    nodes = list(traced.module.graph.nodes)
    first = next(k for k, node in enumerate(nodes) if any("tangents" in each.name for each in node.all_input_nodes))
    return sum(node.target is aten.sigmoid.default for node in nodes[:first])


def test_a_graph_that_draws_is_compared_with_itself() -> None:
    """A rewrite that changes the numbers is seen, and one that does not passes."""
    traced = joint_in_backend(layer, *arguments())
    check_rewrite(traced, lambda module: None)

    def doubled(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if node.args[1] == 1 / 0.9:
                node.args = (node.args[0], 2.0)
        module.recompile()

    with pytest.raises(AssertionError, match="not close"):
        check_rewrite(traced, doubled)


def test_gradients_are_in_the_order_of_the_graphs_inputs() -> None:
    """Dynamo's order is that of the first use, not of the arguments."""

    def backwards(w: Tensor, x: Tensor) -> Tensor:
        return torch.sin(x).matmul(w)

    w, x = torch.randn(4, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    traced = joint_in_backend(backwards, w, x, compiler="eager")
    done = check_rewrite(traced, lambda module: module.recompile())
    assert [list(each.shape) for each in traced.inputs] == [[3, 4], [4, 2], [3, 2]]
    assert traced.num_fwd_outputs == 1 and "aten.cos" in done.before
