"""The joint graph of a model's training step on a device that need not be present: traced without data on a CPU.

Dynamo, AOTAutograd and Inductor's passes on the joint graph run as they do for training.  Attention is replaced by the operators of
the device.  While the graph is planned, every tensor claims to be on the device, so that no rule for a CPU (layouts and workspaces
of convolutions, costs of masks) enters the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx, nn

from compile_remat._torch.cuda_sdpa import replace_cpu_attention, use_cuda_attention
from compile_remat._torch.fake import NumbersAreZero, fake_tensors
from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat._torch.operators import tree_leaves
from compile_remat._torch.tensor_arguments import graph_break_of
from compile_remat._torch.version import version_problem
from compile_remat.cost_models import Device
from compile_remat.errors import RematError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.causes import cause_text, place_text
from compile_remat.inductor.peek import likely_patterns, look_at_joint_graph
from compile_remat.passes.graph.rewrite_list import apply
from compile_remat.passes.graph.rewrites.contract import Context, Stage
from compile_remat.planning.joint_problem import JointModule


@dataclass(frozen=True)
class Traced:
    """A training step, traced.

    Attributes:
        name: The builder's name.
        given: Its joint graph as a partitioner would get it, with the device's attention.  Planning rewrites a copy (`copied`).
        parameter_bytes: Bytes of parameters and buffers.
        trainable_bytes: Bytes of the parameters that need a gradient; their gradients have as many.
        input_bytes: Bytes of the model's inputs.
        times_ns: Names and times of nodes that the cost model does not price: collectives.
    """

    name: str
    given: JointModule
    parameter_bytes: int
    trainable_bytes: int
    input_bytes: int
    times_ns: tuple[tuple[str, int], ...] = ()

    def copied(self) -> JointModule:
        """Returns a copy of the joint graph for planning to rewrite, with tensors on the CPU that traced it."""
        return self.given.copied(is_on_cpu=True)


Built = tuple[nn.Module, tuple[Any, ...]]
"""A model without data, and its inputs."""


def trace(builder: Builder, device: Device, *, model: Built | None = None) -> Traced:
    """Build and trace a model's training step without allocating memory.

    Args:
        model: The model and inputs of the builder, if it is built already.

    Raises:
        ConfigError: The builder, or a size, is invalid.
        RematError: The model breaks into several graphs, needs no gradient, or cannot be traced without data.
    """
    module, inputs = built(builder) if model is None else model
    seen: list[JointModule] = []
    breaks: list[str] = []

    def see(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        breaks.extend(f"{reason}{place_text(frames)}" for reason, frames in graph_break_of(gm))
        if (found := looked_at(gm, example_inputs)) is not None:
            seen.append(found)

    show_graphs(module, inputs, see, builder.name, device)
    if len(seen) != 1:
        refuse(len(seen), builder.name, breaks)
    return Traced(builder.name, with_device_attention(device, seen[0]), *model_bytes(module, inputs))


def show_graphs(
    model: nn.Module,
    inputs: Sequence[Any],
    see: Callable[[fx.GraphModule, Sequence[Any]], None],
    name: str,
    device: Device,
) -> None:
    """Call `see` on every graph that Dynamo makes of a call, with the device's attention operators, and run it without data.

    Raises:
        RematError: The model cannot be traced without data.
    """
    if problem := version_problem():
        raise RematError(f"{problem}: install a supported torch to plan.")
    is_cpu, has_flash = kind_of(device)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        apply(Stage.PROGRAM, gm, Context(inlines_regions=True))
        if not is_cpu:
            use_cuda_attention(gm, has_flash=has_flash)
        see(gm, example_inputs)
        return gm.forward

    _run(model, inputs, backend, name)


def looked_at(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> JointModule | None:
    """Returns the joint graph of a Dynamo graph, as a partitioner would get it; None if there is no backward."""
    with likely_patterns():
        return look_at_joint_graph(gm, example_inputs, lambda joint, keywords: JointModule(joint, **keywords), {})


def with_device_attention(device: Device, graph: JointModule) -> JointModule:
    """Replace attention in a joint graph by the operators of the device, in place; returns the graph."""
    is_cpu, has_flash = kind_of(device)
    if not is_cpu:
        replace_cpu_attention(graph.module, has_flash=has_flash)
    return graph


def kind_of(device: Device) -> tuple[bool, bool]:
    """Returns all properties of a device on which a trace depends: True if it is a CPU, and True if it has flash attention."""
    return device.name == "cpu", "bfloat16" in dict(device.flops_per_s)  # before Ampere a device has neither


def built(builder: Builder) -> Built:
    """Build a model and its inputs, without data."""
    with fake_tensors(builder.torch_dtype), NumbersAreZero():
        return builder.build()


def _run(model: nn.Module, inputs: Sequence[Any], backend: Callable[..., Any], name: str) -> None:
    try:
        with fake_tensors():
            trace_isolated(model, backend, inputs)
    except RematError:
        raise
    except Exception as error:
        raise RematError(f"{name} cannot be traced without data: {cause_text(error)}") from error


def refuse(graphs: int, name: str, breaks: Sequence[str] = ()) -> NoReturn:
    """Raise a `RematError` which says that `graphs` graphs were found instead of one, and the first of the graph breaks."""
    if graphs == 0:
        raise RematError(f"nothing to plan: {name} has no graph with a backward. Does a parameter require a gradient?")
    raise RematError(
        f"{name} falls into {graphs} graphs, and a model that is not run can be planned as one graph only. "
        "Remove the graph breaks: " + (f"the first is {breaks[0]}" if breaks else "torch._dynamo.explain lists them.")
    )


def model_bytes(model: nn.Module, inputs: Sequence[Any]) -> tuple[int, int, int]:
    """Returns the bytes of parameters and buffers, of trainable parameters, and of inputs; shared parameters count once."""
    parameters = list(model.parameters())
    kept = sum(t.nbytes for t in (*parameters, *model.buffers()))
    given = [v for value in inputs for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
    return kept, sum(p.nbytes for p in parameters if p.requires_grad), sum(t.nbytes for t in given)
