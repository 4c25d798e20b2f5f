"""A pass and a policy of your own, on the FX graphs that a training step is made of.

    python examples/own_policy.py

The joint graph of a small network goes through three functions: a rewrite of the graph, a rule that chooses what is saved, and the
split into forward and backward.  The rule's plan is compared with the planner's, and the gradients with eager mode.
"""

from collections.abc import Sequence
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


def squares_as_products(joint: fx.GraphModule) -> int:
    """Rewrite each `pow(x, 2)` as `x * x`, in place; returns how many there were."""
    found = joint.graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar)
    squares = [node for node in found if node.args[1] == 2]
    for node in squares:
        with joint.graph.inserting_before(node):
            product = joint.graph.call_function(aten.mul.Tensor, (node.args[0], node.args[0]))
        product.meta = dict(node.meta)  # the planner reads sizes from meta["val"]
        node.replace_all_uses_with(product)
        joint.graph.erase_node(node)
    joint.recompile()
    return len(squares)


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
    print(f"squares rewritten: {squares_as_products(joint)}")
    problem = build_problem(joint, num_fwd_outputs=num_fwd_outputs, cost=UnitCost())
    planner = Planner(problem)
    ours = planner.plan_of(planner.mask_of(products_only(problem)), budget_bytes=None)
    show("own policy", problem, ours)
    show("planner, within that peak", problem, solve(problem, ours.peak_bytes))
    return extract(joint, ours, num_fwd_outputs=num_fwd_outputs)


def main() -> None:
    """Train one step under the policy, and compare its gradients with eager mode."""
    torch.manual_seed(0)
    inputs = [torch.randn(64, 32), torch.randn(32, 64, requires_grad=True), torch.randn(64, 16, requires_grad=True)]
    compiled = aot_function(network, fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    compiled(*inputs).backward()
    gradients = [inputs[1].grad, inputs[2].grad]
    expected = torch.autograd.grad(network(*inputs), inputs[1:])
    torch.testing.assert_close(gradients, list(expected))
    print("gradients equal those of eager mode")


if __name__ == "__main__":
    main()
