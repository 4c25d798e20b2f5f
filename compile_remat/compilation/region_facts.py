"""Facts of a plan's two graphs, read from their code without kernels and from its dry run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_dry_run import DryRun
from compile_remat.passes import BufferFacts, GraphFacts, KernelFacts


def graph_facts(lowered: Emitted, run: DryRun, beside_bytes: int = 0) -> GraphFacts:
    """Facts of one graph: the nodes that each kernel computes, and the nodes that are written to memory.

    Args:
        lowered: A graph that was read before its code was made: it has `Emitted.nodes_of`.
        run: The dry run of its code.
        beside_bytes: Bytes that are in use beside the graph's own during its whole run.
    """
    kernels = tuple(_kernels(lowered.nodes_of, run.moments, beside_bytes))
    return GraphFacts(kernels, _stored(lowered, run.variables), tuple(_at_peak(lowered.nodes_of, run)))


def _at_peak(nodes_of: Mapping[str, tuple[str, ...]], run: DryRun) -> Iterable[BufferFacts]:
    """Yields the buffers and the workspace at the graph's own peak; an input keeps its name in the graph."""
    for name, nbytes in run.at_peak:
        if nbytes:
            yield BufferFacts((nodes_of.get(name) or (name,))[0], nbytes)
    name, nbytes = run.workspace
    if nbytes:
        yield BufferFacts((nodes_of.get(name) or (name,))[0], nbytes, is_workspace=True)


def _kernels(
    nodes_of: Mapping[str, tuple[str, ...]], moments: Iterable[tuple[str, int]], beside_bytes: int
) -> Iterable[KernelFacts]:
    """Yields the facts of each kernel in order, with the most bytes in use while the kernel's statements run."""
    nodes: tuple[str, ...] = ()
    live_bytes = 0
    for name, nbytes in moments:
        own = nodes_of.get(name, ())
        if own and own != nodes:
            if nodes or live_bytes:
                yield KernelFacts(nodes, live_bytes + beside_bytes)
            nodes, live_bytes = own, 0
        live_bytes = max(live_bytes, nbytes)
    if nodes:
        yield KernelFacts(nodes, live_bytes + beside_bytes)


def _stored(lowered: Emitted, variables: Mapping[str, int]) -> dict[str, int]:
    """Bytes of the buffers in memory, each by the node that Inductor names first as the buffer's origin."""
    found: dict[str, int] = {}
    for name, nbytes in variables.items():
        nodes = lowered.nodes_of.get(name, ())
        if nodes and nbytes:
            found[nodes[0]] = max(found.get(nodes[0], 0), nbytes)
    return found
