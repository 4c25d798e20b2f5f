"""What Inductor emits for one compilation: the code of the forward and of the backward, handed to an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from compile_remat.inductor.light_code.reading import Lowered


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
        nodes_of: For the names of kernels and buffers in the code, the FX nodes that they compute; only of a graph that was
            `Lowered`, whose kernels have no code.
    """

    source_code: str
    inputs: tuple[object, ...]
    names: tuple[str, ...]
    num_outputs: int
    is_backward: bool
    is_inference: bool = False
    nodes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)


Observer = Callable[[Emitted], None]
GraphRewrite = Callable[[fx.GraphModule], fx.GraphModule]
GraphCompiler = Callable[..., Any]
"""``compile_fx_inner`` or what wraps it: ``compiler(graph_module, example_inputs, **options)`` of one graph."""


def observed(compiler: GraphCompiler, observer: Observer, before_code: Observer | None = None) -> GraphCompiler:
    """`compiler`, with each graph's code shown to `observer`, also where the code comes out of Inductor's cache.

    Args:
        compiler: Takes an option `told`, as `watched` does, where `before_code` is given.
        before_code: Is shown each graph that is lowered, before Inductor makes its code; raises where none shall be made.
            A graph whose code comes out of a cache is not lowered.

    Returns:
        A compiler with one more option: `after_lowering`, which is called with what was lowered, behind `before_code`.
    """

    def compile_graph(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        after_lowering: Callable[[Lowered], None] | None = None,
        **options: Any,
    ) -> Any:
        names = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
        num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        inputs = tuple(example_inputs)
        kinds = bool(options.get("is_backward")), bool(options.get("is_inference"))

        def told(lowered: Lowered) -> None:
            assert before_code is not None
            before_code(Emitted(lowered.source_code, inputs, names, num_outputs, *kinds, lowered.nodes_of))
            if after_lowering is not None:
                after_lowering(lowered)

        watching = {} if before_code is None else {"told": told}
        compiled = compiler(gm, example_inputs, **watching, **options)
        source_code = getattr(compiled, "source_code", None)
        if isinstance(source_code, str):
            observer(Emitted(source_code, inputs, names, num_outputs, *kinds))
        return compiled

    return compile_graph
