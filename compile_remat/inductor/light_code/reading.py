"""Reads a graph between Inductor's scheduling and its code: the buffers that the code will allocate, and their FX nodes.

`watch` replaces the ``codegen`` of one scheduler.  At that point Inductor has decided everything but the code: fusions, the order
of kernels, layouts.  Inductor writes the wrapper with kernels that have names and no text (`backends`), and the graph is then
restored (`graph_state`).  If the callback raises, no code is made; if the callback returns, Inductor goes on.

Private names of ``torch._inductor``, same in 2.11 to 2.15: ``Scheduler.codegen``, ``.nodes``, ``.backends``, ``.get_backend``;
``GraphLowering.init_wrapper_code``, ``.wrapper_code``, ``.graph_outputs``, ``.name_to_buffer``, ``.buffers``; ``IRNode.origins``
and ``.origin_node``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from sympy import sympify
from torch._inductor import config

from compile_remat._torch.version import private_name
from compile_remat.errors import warn
from compile_remat.inductor.light_code.backends import use_light_backends
from compile_remat.inductor.light_code.graph_state import untouched
from compile_remat.inductor.light_code.kernels import Kernels

LOG = logging.getLogger("compile_remat")
V = private_name("torch._inductor.virtualized", "V")
SubgraphLowering = private_name("torch._inductor.graph", "SubgraphLowering")
IRNode = private_name("torch._inductor.ir", "IRNode")
ExternKernel = private_name("torch._inductor.ir", "ExternKernel")
OrderedSet = private_name("torch.utils._ordered_set", "OrderedSet")

symbol_is_type = private_name("torch.utils._sympy.symbol", "symbol_is_type")
SymT = private_name("torch.utils._sympy.symbol", "SymT")
UNBACKED = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)

UNSEEN = {"trace.provenance_tracking_level": 0}
"""Options under which Inductor does not record the provenance of kernels."""

UNREADABLE = (
    "a graph cannot be read before Inductor makes its code (REMAT_LOG=info shows the reason): the budget is checked with that "
    "code, and later plans of the graph do not learn from it"
)

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """One graph after Inductor's scheduler.

    Attributes:
        source_code: The wrapper that the graph will get, with kernels that have no code.
        nodes_of: Names of the FX nodes that a kernel or buffer of the wrapper computes, by its name.
        output_strides: Strides of each output in Inductor's layout; None for an output that is no tensor or has symbolic strides.
    """

    source_code: str
    nodes_of: dict[str, tuple[str, ...]] = field(repr=False)
    output_strides: tuple[Strides | None, ...] = ()


Told = Callable[[Lowered], None]
"""Called with a lowered graph; raises to prevent its code."""

_kernels: ContextVar[Kernels | None] = ContextVar("the kernels of the graph that is being read", default=None)


def watch(graph: Any, told: Told) -> None:
    """Have `told` called with a graph right before Inductor makes its code; to be called while the graph's scheduler is made.

    `told` does not get the graphs of control flow and of regions: Inductor lowers them with the graph that they are part of.  If
    the graph cannot be read for any reason, Inductor goes on; the reason is logged, and the user is warned once in a process.
    """
    scheduler, kernels = graph.scheduler, _kernels.get()
    codegen = scheduler.codegen
    if kernels is None and isinstance(graph, SubgraphLowering):
        return

    def codegen_watched() -> Any:
        del scheduler.codegen
        if kernels is not None:
            use_light_backends(scheduler, kernels)
            return codegen()
        lowered = _read(graph)
        if lowered is not None:
            told(lowered)
        return codegen()

    scheduler.codegen = codegen_watched


def _read(graph: Any) -> Lowered | None:
    token = _kernels.set(Kernels())
    try:
        with untouched(graph), graph.sizevars.shape_env.suppress_guards(), config.patch(UNSEEN):
            return read(graph)
    except Exception:  # Inductor's code generators may raise anything on a graph; it is compiled without being read
        LOG.info("the lowered graph cannot be read", exc_info=True)
        warn(UNREADABLE)
        return None
    finally:
        _kernels.reset(token)


def read(graph: Any) -> Lowered:
    """Make the wrapper's code of a lowered graph; the graph cannot be used again, unless it is kept `untouched`."""
    scheduler, kernels = graph.scheduler, _kernels.get()
    assert kernels is not None
    graph.init_wrapper_code()
    wrapper = graph.wrapper_code
    use_light_backends(scheduler, kernels)
    wrapper.push_codegened_graph(graph)
    if not _has_symbols(graph):  # Inductor looks for them in each node, which takes as long as all else here
        scheduler.get_graph_partition_symbol_inputs = lambda *args: OrderedSet()
    scheduler.codegen()
    code = wrapper.generate(graph.is_inference)[0].value
    wrapper.pop_codegened_graph()
    order = _order(graph)
    nodes_of = {name: _names([node.node for node in nodes], order) for name, nodes in kernels.items()}
    nodes_of |= {name: _names([buffer], order) for name, buffer in graph.name_to_buffer.items()}
    return Lowered(code, nodes_of, tuple(map(_strides, graph.graph_outputs)))


def _has_symbols(graph: Any) -> bool:
    """True if sizes in the graph may be symbols: sizes of its inputs, or data-dependent sizes."""
    known = graph.sizevars.shape_env.var_to_range
    return any(symbol_is_type(each, UNBACKED) for each in known) or any(map(_is_symbolic, graph.graph_inputs.values()))


def _is_symbolic(given: Any) -> bool:
    if not isinstance(given, IRNode) or not given.has_tensor_output():
        return True
    layout = given.get_layout()
    return any(sympify(each).free_symbols for each in (*layout.size, *layout.stride, layout.offset))


def _order(graph: Any) -> dict[str, int]:
    """Ranks of the FX nodes' names, from last to first; views, and nodes of kernels that Inductor does not fuse, follow the others.

    A buffer without a single origin lists all nodes that its kernel computes, and the last of them is what the buffer holds: the
    first pass of a reduction in two passes is an example.  A copy that is made for an unfused kernel lists that kernel too.
    """
    made = (buffer.get_origin_node() for buffer in graph.buffers if isinstance(buffer, ExternKernel))
    extern = {origin.name for origin in made if origin is not None}
    nodes = sorted(reversed(graph.graph.nodes), key=lambda node: node.name in extern or _is_view(node))
    return {node.name: rank for rank, node in enumerate(nodes)}


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _names(made: Sequence[Any], order: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the FX nodes that some operations of Inductor compute: first the single origin of each, then others by `order`."""
    found: dict[str, None] = {}
    for each in made:
        origin = None if each is None else each.get_origin_node()
        found |= dict.fromkeys([origin.name] if origin is not None else [])
    for each in made:
        names = [origin.name for origin in getattr(each, "origins", ())]
        found |= dict.fromkeys(sorted(names, key=lambda name: (order.get(name, len(order)), name)))
    return tuple(found)


def _strides(output: Any) -> Strides | None:
    if not isinstance(output, IRNode) or not output.has_tensor_output():
        return None
    strides = output.get_layout().stride
    return tuple(map(int, strides)) if all(each.is_number for each in map(sympify, strides)) else None
