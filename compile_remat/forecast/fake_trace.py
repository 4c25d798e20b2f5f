"""The joint graph of a model's training step on a device that need not be present: traced without data on a CPU.

Dynamo, AOTAutograd and Inductor's passes on the joint graph run as they do for training.  Attention is replaced by the operators of
the device.  Then every tensor of the graph claims to be on the device, so that no rule for a CPU (layouts and workspaces of
convolutions, costs of masks) enters the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import fx, nn

from compile_remat._torch import joint_graph
from compile_remat._torch.cuda_sdpa import replace_cpu_attention, use_cuda_attention
from compile_remat._torch.fake import NumbersAreZero, fake_tensors, say_device
from compile_remat._torch.isolated_trace import trace_isolated
from compile_remat._torch.operators import tree_leaves
from compile_remat._torch.version import version_problem
from compile_remat.cost_models import Device
from compile_remat.errors import RematError
from compile_remat.forecast.builders import Builder
from compile_remat.inductor.called_regions import inline_regions
from compile_remat.inductor.peek import likely_patterns, look_at_joint_graph
from compile_remat.passes import add_snapshots, as_in_torch, readable_inputs, rewritten

Seen = tuple[fx.GraphModule, dict[str, Any]]
"""A joint graph, and the keyword arguments that a partitioner gets with it."""


@dataclass(frozen=True)
class Traced:
    """A training step, traced.

    Attributes:
        joint: Its joint graph, rewritten; its convolutions are not split yet.  Tensors are on a CPU until `place`.
        parameter_bytes: Bytes of parameters and buffers.
        trainable_bytes: Bytes of the parameters that need a gradient; their gradients have as many.
        input_bytes: Bytes of the model's inputs.
        times_ns: Names and times of nodes that the cost model does not price: collectives.
        whole: Its joint graph as a partitioner would get it, kept if rows of the graph are to be computed in slices.
    """

    joint: joint_graph.Joint
    parameter_bytes: int
    trainable_bytes: int
    input_bytes: int
    times_ns: tuple[tuple[str, int], ...] = ()
    whole: Seen | None = None

    def place(self, device: Device) -> None:
        """Mark all tensors as being on `device`; afterwards no operator may run on them."""
        if device.name == "cpu":
            return
        for module in self.joint.module.modules():  # graphs of slices, too
            if isinstance(module, fx.GraphModule):
                say_device(module, torch.device("cuda", 0))

    def cut_off(self, inputs: str) -> Traced:
        """Returns the step with a backward that reads only inputs that the setting `inputs` allows; rewrites the graph in place.

        Call it while tensors are still on the CPU, and after torch's own chooser has run.
        """
        return replace(self, joint=add_snapshots(self.joint, are_wanted=inputs != "constant"))

    def whole_on_cpu(self) -> Seen:
        """Returns a copy of the whole graph on which operators may run; it shares fake tensors with the step's other graphs."""
        assert self.whole is not None
        module, keywords = copy_of(self.whole)
        say_device(module, torch.device("cpu"))
        return module, keywords


Built = tuple[nn.Module, tuple[Any, ...]]
"""A model without data, and its inputs."""


def trace(builder: Builder, device: Device, *, model: Built | None = None, keeps_whole: bool = False) -> Traced:
    """Build and trace a model's training step without allocating memory.

    Args:
        model: The model and inputs of the builder, if it is built already.
        keeps_whole: True to keep, as `Traced.whole`, the graph as a partitioner would get it.

    Raises:
        ConfigError: The builder, or a size, is invalid.
        RematError: The model breaks into several graphs, needs no gradient, or cannot be traced without data.
    """
    module, inputs = built(builder) if model is None else model
    seen: list[Seen] = []

    def see(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        if (found := looked_at(gm, example_inputs)) is not None:
            seen.append(found)

    show_graphs(module, inputs, see, builder.name, device)
    if len(seen) != 1:
        refuse(len(seen), builder.name)
    given = _with_attention_of(device, seen[0])
    whole = copy_of(given) if keeps_whole else None
    joint = rewritten_joint(given)
    if joint is None:
        refuse(0, builder.name)
    return Traced(joint, *model_bytes(module, inputs), whole=whole)


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
        raise RematError(f"{problem}: nothing can be planned with this torch.")
    is_cpu, has_flash = kind_of(device)

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        inline_regions(gm)
        if not is_cpu:
            use_cuda_attention(gm, has_flash=has_flash)
        see(gm, example_inputs)
        return gm.forward

    _run(model, inputs, backend, name)


def looked_at(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Seen | None:
    """Returns the joint graph of a Dynamo graph, as a partitioner would get it; None if there is no backward."""
    with likely_patterns():
        return look_at_joint_graph(gm, example_inputs, lambda joint, keywords: (joint, keywords), {})


def joint_of(seen: Seen, device: Device) -> joint_graph.Joint | None:
    """Returns the joint graph with the device's attention, rewritten for planning; None if it has no backward."""
    return rewritten_joint(_with_attention_of(device, seen))


def copy_of(seen: Seen) -> Seen:
    """Returns a copy of the graph with the same nodes, for planning to rewrite."""
    module, keywords = seen
    return joint_graph.copied_graph(module), keywords


def _with_attention_of(device: Device, seen: Seen) -> Seen:
    """Replace attention in a joint graph by the operators of the device, in place."""
    is_cpu, has_flash = kind_of(device)
    if not is_cpu:
        replace_cpu_attention(seen[0], has_flash=has_flash)
    return seen


def rewritten_joint(seen: Seen, readable: joint_graph.ReadableInputs | None = None) -> joint_graph.Joint | None:
    """Returns a joint graph, which has the device's attention already, rewritten for planning; None if it has no backward.

    Args:
        readable: The inputs that the backward may read; None for the inputs that plain torch.compile's backward reads here.
    """
    module, keywords = seen
    joint = as_in_torch(module, **keywords)
    if not joint.has_backward:
        return None
    if readable is None:
        readable = readable_inputs(joint, joint_graph.plain_choice(joint))
    return rewritten(replace(joint, readable=readable), splits_convolutions=False)


def kind_of(device: Device) -> tuple[bool, bool]:
    """Returns all properties of a device on which a trace depends: True if it is a CPU, and True if it has flash attention."""
    return device.name == "cpu", "bfloat16" in dict(device.flops_per_s)  # before Ampere a device has neither


def bytes_of_model(builder: Builder) -> tuple[int, int, int]:
    """Returns the bytes of a model's parameters and buffers, of its trainable parameters, and of its inputs."""
    return model_bytes(*built(builder))


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
        reason = str(error).strip().splitlines()
        raise RematError(
            f"{name} cannot be traced without data: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error


def refuse(graphs: int, name: str) -> NoReturn:
    """Raise a `RematError` which says that `graphs` graphs were found instead of one."""
    if graphs == 0:
        raise RematError(f"nothing to plan: {name} has no graph with a backward. Does a parameter require a gradient?")
    raise RematError(
        f"{name} falls into {graphs} graphs, and only one can be planned without running it: "
        "torch._dynamo.explain names what breaks them."
    )


def model_bytes(model: nn.Module, inputs: Sequence[Any]) -> tuple[int, int, int]:
    """Returns the bytes of parameters and buffers, of trainable parameters, and of inputs; shared parameters count once."""
    parameters = list(model.parameters())
    kept = sum(t.nbytes for t in (*parameters, *model.buffers()))
    given = [v for value in inputs for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
    return kept, sum(p.nbytes for p in parameters if p.requires_grad), sum(t.nbytes for t in given)
