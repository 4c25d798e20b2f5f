"""Dynamo's facts about a graph and its arguments, and contexts in which the graph can be compiled or run a second time.

Private names of torch, 2.11 to 2.15: ``torch._dynamo.symbolic_convert.TensorifyState`` and a shape environment's
`backed_var_to_val`.  Written against torch 2.13.0; a source's ``name`` may be a method in other versions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import FrameSummary
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from compile_remat._torch.version import private_name

tensorify_state = private_name("torch._dynamo.symbolic_convert", "TensorifyState")


def argument_sources(module: fx.GraphModule) -> list[str]:
    """Returns Dynamo's source of each argument, such as ``L['self']._modules['0']._parameters['weight']``, or its node's name."""
    found: list[str] = []
    for node in module.graph.find_nodes(op="placeholder"):
        name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", node.name)
        found.append(str(name() if callable(name) else name))
    return found


def graph_break_of(module: fx.GraphModule) -> list[tuple[str, list[FrameSummary]]]:
    """Returns the first line of Dynamo's reason for the break that ended its graph, with the stack there; empty without a break."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return []
    assert reason is not None
    return [(str(reason.reason).partition("\n")[0], list(reason.user_stack))]


def ends_in_graph_break(module: fx.GraphModule) -> bool:
    """Returns whether a graph break ends the graph, so that more graphs of the traced function may follow in the step.

    Reads a private attribute of the graph module, same in 2.11, 2.13 and 2.15.  The graphs behind a break need no such mark: when
    Dynamo compiles the function in which it resumes, the calls of the earlier graphs are in flight.
    """
    return bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))


def is_cut_by_torch() -> bool:
    """Returns whether torch splits Dynamo's graph at the buckets of DDP now, and compiles each part by itself.

    Reads a private attribute, same in 2.11 to 2.15: ``TracingContext.fakify_first_call``, which ``DDPOptimizer`` sets.
    """
    context = torch._guards.TracingContext.try_get()
    return context is not None and context.fakify_first_call


def has_fake(args: Sequence[Any]) -> bool:
    """Returns whether an argument is a fake tensor: torch itself makes such calls while it compiles."""
    return any(isinstance(a, FakeTensor) for a in args)


def is_wrapper_subclass(value: object) -> bool:
    """Returns whether a value is a wrapper subclass, a tensor made of other tensors, such as a DTensor or a nested tensor."""
    return isinstance(value, torch.Tensor) and bool(is_traceable_wrapper_subclass(value))


def is_plain_tensor(value: torch.Tensor) -> bool:
    """Returns whether a tensor is strided and consists of its elements in memory alone: no subclass with a dispatch of its own, no
    wrapper of ``torch.func``, not lazily conjugated or negated."""
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or value.layout is not torch.strided:
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_conj() or value.is_neg())


def version_of(value: object) -> int | None:
    """Returns autograd's version counter of a tensor; None for an inference tensor and for any other value."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None


def no_torch_function() -> AbstractContextManager[None]:
    """Returns a context in which operators on tensor subclasses return plain tensors."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


@contextmanager
def detached_from_callers_autograd() -> Iterator[None]:
    """Hide compiled autograd and the active saved-tensor hooks, such as those of a checkpoint around the call."""
    from torch._dynamo import compiled_autograd

    with compiled_autograd._disable(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@contextmanager
def own_tracing_context() -> Iterator[None]:
    """Use a copy of Dynamo's tracing context, for a second compilation of the same Dynamo graph.

    Both compilations write facts (such as the saved tensors that the backward may overwrite) into the tracing context.  The first
    one's backward, which Inductor compiles later, would otherwise read the facts of the second one.
    """
    with tracing(copy.copy(TracingContext.try_get())):
        yield


# -- compiling later ------------------------------------------------------------------------------------------------------


def traced_inputs(module: fx.GraphModule) -> list[Any] | None:
    """Returns the fake tensors and sizes that Dynamo traced a graph's arguments as; None if a real tensor or nothing is known."""
    found = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    is_light = all(v is not None and (isinstance(v, FakeTensor) or not isinstance(v, torch.Tensor)) for v in found)
    return found if is_light else None


@contextmanager
def scalars_as_numbers(inputs: Sequence[Any]) -> Iterator[None]:
    """Let a compilation outside of Dynamo specialise on the values of scalar tensors, as a pass of torch asks Dynamo to.

    Torch makes a symbol of the value of a tensor without dimensions.  If no code can be made with the symbol, the first
    compilation of the graph restarts Dynamo; a graph from torch's cache has not been through that pass.  `guards_of` shows if a
    compilation added guards, which Dynamo would not check.
    """
    mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    symbols = {} if mode is None or mode.shape_env is None else mode.shape_env.backed_var_to_val
    known = tensorify_state.force_specializations
    added = {str(symbol) for symbol, value in symbols.items() if value.is_Float} - known
    known |= added
    try:
        yield
    finally:
        known -= added


def guards_of(inputs: Sequence[Any]) -> int:
    """Returns the number of guards on symbolic sizes so far; Dynamo does not check the guards that are added later."""
    mode = next((v.fake_mode for v in inputs if isinstance(v, FakeTensor)), None)
    return 0 if mode is None or mode.shape_env is None else len(mode.shape_env.guards)
