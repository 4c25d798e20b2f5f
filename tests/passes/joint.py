"""Joint graphs for tests of passes: traced from a function, printed, and checked before and after a rewrite.

A test of a rewrite reads like this: the golden text teaches what the rewrite does, the rest is checked by `check_rewrite`.

    done = check_rewrite(joint_of(function, x, w), rewrite)
    assert_expected_inline(done.changes, ...)
"""

from __future__ import annotations

import copy
import difflib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import aot_function, default_partition, nop
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions

from compile_remat.backend import remat
from compile_remat.cost_models import is_random
from compile_remat.errors import PassError

DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "b8"}


@dataclass(frozen=True)
class Traced:
    """A joint graph with inputs that it can be run on.

    Attributes:
        module: The joint graph as AOTAutograd hands it to a partitioner: placeholders are primals, then tangents.
        inputs: A tensor for each placeholder; tangents are ones.
        num_fwd_outputs: Number of outputs that are the forward's; the other outputs are gradients.
        expected: Eager mode's outputs and gradients, in order; None for an input that needs no gradient. Of a graph that draws
            random numbers, which are others than eager mode's, what the graph itself gives.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    num_fwd_outputs: int
    expected: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class BeforeAfter:
    """A graph before and after a rewrite, as text, and what the rewrite returned."""

    before: str
    after: str
    result: Any
    module: fx.GraphModule

    @property
    def changes(self) -> str:
        """The lines of the text before that are gone, marked with -, and those of the text after that are new, with +."""
        lines = difflib.ndiff(self.before.splitlines(), self.after.splitlines())
        return "\n".join(line for line in lines if line.startswith(("-", "+")))


def joint_of(
    function: Callable[..., Any],
    *arguments: Any,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Traced:
    """The joint graph of a call, as AOTAutograd hands it over: a rewrite of this package starts from one that can be read.

    Passes of `joint_passes` get another one, see `joint_in_backend`.

    Args:
        arguments: Tensors; those that require a gradient get one.
        decompositions: Of operators, by default torch's core ones. The backend decomposes more: a `sigmoid` or a
            `native_dropout` that is here is not there.
    """
    found: list[tuple[fx.GraphModule, int]] = []

    def spy(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **keywords: Any) -> Any:
        found.append((copy.deepcopy(joint), num_fwd_outputs))
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **keywords)

    table = core_aten_decompositions() if decompositions is None else decompositions
    compiled = aot_function(function, nop, nop, partition_fn=spy, decompositions=table)
    compiled(*copy_of(arguments))
    ((module, num_fwd_outputs),) = found
    outputs, gradients = eager(function, arguments)
    tangents = [torch.ones_like(out) for out in outputs if out.requires_grad]
    inputs = (*copy_of(arguments), *tangents)
    return Traced(module, inputs, num_fwd_outputs, (*(out.detach() for out in outputs), *gradients))


def joint_in_backend(
    function: Callable[..., Any], *arguments: Any, compiler: str = "inductor", memory_budget: str = "min"
) -> Traced:
    """The joint graph that a pass of `joint_passes` gets for this call under `torch.compile(function, backend="remat")`.

    The backend runs up to that pass, so it is made with Inductor's decompositions, and behind torch's passes and our rewrites
    of the joint graph; no plan and no code is made. Test passes on it: one that looks for an operator that only `joint_of` has
    changes nothing in training.

    Args:
        arguments: The tensors that the function reads; those that require a gradient get one.
        compiler: As the setting; `eager` leaves out Inductor's passes over joint graphs.
        memory_budget: As the setting; `max` leaves out the rewrites that save memory for time.
    """
    modules, called = list[fx.GraphModule](), list[tuple[Any, ...]]()

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        options = {"memory_budget": memory_budget, "compiler": compiler, "joint_passes": _Stop(modules)}
        compiled = remat(module, example_inputs, options=options)

        def call(*inputs: Any) -> Any:
            called.append(inputs)
            return compiled(*inputs)

        return call

    torch.compiler.reset()
    try:
        torch.compile(function, backend=backend, dynamic=False)(*arguments)
    except PassError:
        if not modules:
            raise
    (module,), (inputs,) = modules, called
    outputs, gradients = eager(function, arguments)
    by_argument = dict(zip(map(id, arguments), gradients, strict=True))
    tangents = [torch.ones_like(out) for out in outputs if out.requires_grad]
    expected = (*(out.detach() for out in outputs), *(by_argument[id(each)] for each in inputs))
    traced = Traced(module, (*copy_of(inputs), *tangents), len(outputs), expected)
    if any(map(is_random, module.graph.nodes)):
        return replace(traced, expected=tuple(results(module, traced.inputs)))
    return traced


class _Stop:
    """A pass that keeps the graph that it gets, and ends the compilation."""

    def __init__(self, found: list[fx.GraphModule]) -> None:
        self.found, self.identity = found, uuid.uuid4().hex

    def __call__(self, graph: fx.Graph) -> None:
        self.found.append(copy.deepcopy(graph.owning_module))
        raise StopIteration

    def uuid(self) -> str:
        """An identity that no cache knows."""
        return self.identity


def eager(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and for each argument its gradient where every output's is one."""
    given = copy_of(arguments)
    result = function(*given)
    outputs = list(result) if isinstance(result, tuple | list) else [result]
    wanted = [a for a in given if isinstance(a, Tensor) and a.requires_grad]
    made = torch.autograd.grad([out.sum() for out in outputs if out.requires_grad], wanted, allow_unused=True)
    by_input = dict(zip(map(id, wanted), made, strict=True))
    return outputs, [by_input.get(id(a)) for a in given]


def copy_of(arguments: Sequence[Any]) -> list[Any]:
    """The arguments with memory of their own, so that a call may write into them."""
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in arguments]


def text(graph: fx.Graph, start: str = "") -> str:
    """The graph's operators, one a line: what each gives and what it reads.

    Args:
        start: The name of the first operator that is printed; by default all are.
    """
    lines = [_line(node) for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    names = [node.name for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    return "\n".join(lines[names.index(start) if start else 0 :])


def lines_with(graph: fx.Graph, *words: str) -> str:
    """The lines of `text` that have one of the words, and the last one."""
    *lines, last = text(graph).splitlines()
    return "\n".join([*(line for line in lines if any(word in line for word in words)), last])


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {', '.join(map(str, node.args[0]))}"  # type: ignore[arg-type]
    arguments = [str(a) for a in node.args] + [
        f"{k}={v}" for k, v in node.kwargs.items() if k not in ("device", "layout")
    ]
    target = getattr(node.target, "overloadpacket", None)
    name = str(target) if target is not None else getattr(node.target, "__name__", str(node.target))
    return f"{node.name}{_kind(node.meta.get('val'))} = {name}({', '.join(arguments)})"


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return ""
    return f": {DTYPES.get(value.dtype, str(value.dtype))}{list(value.shape)}"


def check_rewrite(traced: Traced, rewrite: Callable[[fx.GraphModule], Any], *, start: str = "") -> BeforeAfter:
    """Rewrite a copy of the graph and check it: it is well-formed, its metadata is true, and it computes the same numbers.

    Args:
        rewrite: Changes the module that it is given, in place.
        start: As for `text`.
    """
    module = copy.deepcopy(traced.module)
    before = text(module.graph, start)
    run(traced.module, traced.inputs, traced.expected)  # eager's numbers, before anything is blamed on the rewrite
    result = rewrite(module)
    module.graph.lint()
    run(module, traced.inputs, traced.expected)
    assert module.code == fx.GraphModule(module, module.graph).code, "the module was not recompiled"
    return BeforeAfter(before, text(module.graph, start), result, module)


def run(module: fx.GraphModule, inputs: Sequence[Any], expected: Sequence[Tensor | None]) -> None:
    """Run a graph: its outputs are those expected, and each node gives what its ``meta["val"]`` says."""
    outputs = results(module, inputs)
    assert len(outputs) == len(expected)
    for actual, wanted in zip(outputs, expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(actual, wanted)


def results(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Tensor | None]:
    """The outputs of a graph whose operators draw from a seed of 0; each node has to give what its ``meta["val"]`` says."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return list(_Checked(module).run(*copy_of(inputs), enable_io_processing=False))


class _Checked(fx.Interpreter):
    """Compares what a node gives with its fake value."""

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            fake = n.meta.get("val")
            assert isinstance(fake, Tensor), f"{n.name} has no fake value"
            assert (fake.dtype, list(map(int, fake.shape))) == (value.dtype, list(value.shape)), n.name
        return value
