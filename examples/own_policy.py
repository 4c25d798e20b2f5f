"""A pass and a policy of your own, on the FX graphs that a training step is made of.

    python examples/own_policy.py

First the backend runs the pass: the planner then plans the graph that the pass has made.  Then the joint graph of the same
network goes through three functions by hand: the pass, a rule that chooses what is saved, and the split into forward and
backward.  The rule's plan is compared with the planner's, and all gradients with eager mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_function, nop
from torch import Tensor, fx

from compile_remat.cost_models import UnitCost
from compile_remat.passes import Plan, Planner, Problem, build_problem, extract, solve, timeline

aten = torch.ops.aten


def network(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Two layers: a squared ReLU between two products, and the sum of squares of the result."""
    hidden = torch.relu(x @ w1).pow(2)
    return (hidden @ w2).pow(2).sum()


class SquaresAsProducts:
    """Rewrites each `pow(x, 2)` of a graph as `x * x`, in place."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite one graph; the backend calls this."""
        found = graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
        for node in [node for node in found if node.args[1] == 2]:
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
            product.meta = dict(node.meta)  # the planner reads sizes from meta["val"]
            node.replace_all_uses_with(product)
            graph.erase_node(node)
            self.count += 1

    def uuid(self) -> str:
        """The identity of this pass in caches: change it when the code changes."""
        return "squares as products, version 1"


def products_only(problem: Problem) -> list[str]:
    """The policy: save the results of matrix products and nothing else."""
    return [value.name for value in problem.values if value.name.startswith("mm")]


def show(title: str, problem: Problem, plan: Plan) -> None:
    """What a plan keeps, and the live bytes of each kernel under it."""
    live = timeline(problem, plan)
    print(
        f"{title}: saves {', '.join(plan.saved)}; peak {plan.peak_bytes} bytes; {plan.recompute_time_ns} operators run twice"
    )
    print("  " + "  ".join(f"{kernel} {nbytes}" for kernel, nbytes in zip(live.kernels, live.live_bytes, strict=True)))


def partition(
    joint: fx.GraphModule, joint_inputs: Sequence[object], *, num_fwd_outputs: int, **keywords: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A partition function for AOTAutograd: joint graph in, forward and backward out."""
    squares = SquaresAsProducts()
    squares(joint.graph)
    joint.recompile()
    print(f"by hand: {squares.count} squares rewritten")
    problem = build_problem(joint, num_fwd_outputs=num_fwd_outputs, cost=UnitCost())
    planner = Planner(problem)
    ours = planner.plan_of(planner.mask_of(products_only(problem)), budget_bytes=None)
    show("own policy", problem, ours)
    show("planner, within that peak", problem, solve(problem, ours.peak_bytes))
    return extract(joint, ours, num_fwd_outputs=num_fwd_outputs)


def in_backend(compiler: str) -> Callable[..., Tensor]:
    """The network compiled by the backend, with the pass."""
    squares = SquaresAsProducts()
    options = {"memory_budget": "min", "joint_passes": (squares,), "compiler": compiler}
    compiled = torch.compile(network, backend="remat", options=options)

    def call(*inputs: Tensor) -> Tensor:
        result: Tensor = compiled(*inputs)
        print(f"in the backend: {squares.count} squares rewritten, in all plans that were tried")
        return result

    return call


def main(compiler: str = "inductor") -> None:
    """Train one step with the pass in the backend and one under the policy, and compare their gradients with eager mode."""
    torch.manual_seed(0)
    inputs = [torch.randn(64, 32), torch.randn(32, 64, requires_grad=True), torch.randn(64, 16, requires_grad=True)]
    expected = torch.autograd.grad(network(*inputs), inputs[1:])
    by_hand = aot_function(network, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    for compiled in (in_backend(compiler), by_hand):
        actual = torch.autograd.grad(compiled(*inputs), inputs[1:])
        torch.testing.assert_close(actual, expected)
    print("gradients equal those of eager mode")


if __name__ == "__main__":
    main()
