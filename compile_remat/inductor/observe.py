"""What Inductor emits for one compilation: the code of the forward and of the backward, handed to an observer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Emitted:
    """What Inductor made of one graph.

    Attributes:
        source_code: Its output code.
        inputs: What the code is called with: tensors, real or fake, and sizes.
        names: The graph's placeholders, one for each input.
        num_outputs: How many values it returns.
        is_backward: Whether it is the backward of another graph.
        is_inference: Whether it was compiled for inference: it has no backward, or holds one itself.
    """

    source_code: str
    inputs: tuple[object, ...]
    names: tuple[str, ...]
    num_outputs: int
    is_backward: bool
    is_inference: bool = False


Observer = Callable[[Emitted], None]
GraphRewrite = Callable[[fx.GraphModule], fx.GraphModule]
GraphCompiler = Callable[..., Any]
"""``compile_fx_inner`` or what wraps it: ``compiler(graph_module, example_inputs, **options)`` of one graph."""


def observed(compiler: GraphCompiler, observer: Observer) -> GraphCompiler:
    """`compiler`, with each graph's code shown to `observer`, also where the code comes out of Inductor's cache."""

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        inputs = tuple(example_inputs)
        compiled = compiler(gm, example_inputs, **options)
        source_code = getattr(compiled, "source_code", None)
        if isinstance(source_code, str):
            kinds = bool(options.get("is_backward")), bool(options.get("is_inference"))
            observer(Emitted(source_code, inputs, names, num_outputs, *kinds))
        return compiled

    return compile_graph
