"""Shows the code that Inductor emits for one compilation, of forward and backward, to an observer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from compile_remat.inductor.light_code.reading import Lowered


@dataclass(frozen=True)
class Emitted:
    """Inductor's output for one graph.

    Attributes:
        source_code: The output code.
        inputs: Arguments of the code: tensors, real or fake, and sizes.
        names: Names of the graph's placeholders, one for each input.
        num_outputs: Number of values that the code returns.
        is_backward: True if the graph is the backward of another graph.
        is_inference: True if the graph was compiled for inference: it has no backward, or contains one itself.
        nodes_of: FX nodes that each kernel or buffer in the code computes, by its name; empty unless the graph was `Lowered`,
            so that its kernels have no code.
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
"""``compile_fx_inner`` or a wrapper of it: ``compiler(graph_module, example_inputs, **options)`` compiles one graph."""


def observed(compiler: GraphCompiler, observer: Observer, before_code: Observer | None = None) -> GraphCompiler:
    """Returns `compiler`, which also shows each graph's code to `observer`, even if the code comes out of Inductor's cache.

    Args:
        compiler: Has to take the option `told`, as `watched` does, if `before_code` is given.
        before_code: Called with each lowered graph before Inductor makes its code; raises to prevent the code.
            A graph whose code comes out of a cache is not lowered.

    Returns:
        A compiler with one more option: `after_lowering`, which is called with the `Lowered` graph after `before_code`.
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
