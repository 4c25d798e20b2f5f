"""Finds where a budget may not hold: graphs without a plan, uncompiled code, options that change memory after the plan.

Private names of torch, looked up by name: a name that a version lacks is never found.  Dynamo's reason for the end of a graph
(``compile_subgraph_reason``) is the same in 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from compile_remat.inductor.inductor_options import inductor_option

GRADIENTS_INSIDE = (
    "it computes gradients itself (torch.autograd.grad, torch.func.grad), and its graph for inference cannot be planned"
)
NO_BACKWARD = "nothing in it has a backward"

_NESTING = "_grad_increment_nesting"
"""Name of a function that Dynamo calls in the graphs of ``torch.func.grad``, ``vjp`` and similar transforms."""

OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "cpp_wrapper": (bool, "the peak of its C++ code cannot be read and compared with the budget"),
    "triton.multi_kernel": (
        bool,
        "each kernel is chosen when it first runs, after the peak was compared with the budget",
    ),
    "post_grad_fusion_options": (
        lambda passes: "activation_quantization_aten_pass" in passes,
        "activation_quantization_aten_pass quantises saved activations after they were planned",
    ),
}
"""Accepted Inductor options that change the code's memory after the plan: a test of the value, and the reason."""


def reason_without_plan(module: fx.GraphModule) -> str:
    """Returns why a Dynamo graph has no plan, given that no partitioner was called for it."""
    return GRADIENTS_INSIDE if computes_gradients(module) else NO_BACKWARD


def computes_gradients(module: fx.GraphModule) -> bool:
    """Returns whether a Dynamo graph calls functions that compute gradients."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    targets = [n.target for graph in graphs for n in graph.nodes if n.op == "call_function"]
    inside = (torch.autograd.grad, torch.autograd.backward)
    return any(t in inside or getattr(t, "__name__", "") == _NESTING for t in targets)


def uncompiled_code(module: fx.GraphModule) -> str:
    """Describes code that Dynamo leaves out after a graph and that may hold memory of its own; empty for other graph breaks."""
    end = getattr(module, "compile_subgraph_reason", None)
    reason = str(getattr(end, "reason", ""))
    if reason == "step_unsupported":
        frames = getattr(end, "user_stack", None) or ()
        line = f", line {frames[-1].lineno} of {frames[-1].filename} ({frames[-1].line})" if frames else ""
        return f"Dynamo does not compile the rest of a function{line}: TORCH_LOGS=graph_breaks says why"
    if "torch.compiler.disable" in reason.partition("\n")[0]:
        return "a function under torch.compiler.disable runs in the middle of the step"
    return ""


def unmodelled_options(patches: Mapping[str, Any]) -> list[str]:
    """Inductor options in force that no plan models, each with the reason.

    Args:
        patches: Options of this compilation; all other options have their process-wide values.
    """
    found = []
    for name, (is_on, why) in OPTIONS.items():
        value = inductor_option(name, patches)
        if value is not None and is_on(value):
            found.append(f"{name} is on: {why}")
    return found
