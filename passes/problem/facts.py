"""Facts about the two graphs of one plan, as the code generator lowered them: plain data, independent of the observer.

A `Problem` is built by crude rules: a pointwise value is in registers unless something needs the value in memory.  A code
generator uses more rules, and each version has other rules.  So a plan's own graphs are lowered, and the observed facts replace
the assumed ones (`Assumptions`, `Problem.with_facts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from compile_remat._util import json_values


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, or one call of an operator.

    Attributes:
        nodes: Names of the graph's nodes that the kernel computes.
        live_bytes: Bytes in use while the kernel runs, workspace included.
    """

    nodes: tuple[str, ...]
    live_bytes: int


@dataclass(frozen=True)
class BufferFacts:
    """One buffer that is in use at a peak.

    Attributes:
        node: Name of the node in the buffer, or of the node whose kernel takes the buffer as workspace.
        is_workspace: True if the buffer is a kernel's workspace.
    """

    node: str
    nbytes: int
    is_workspace: bool = False


@dataclass(frozen=True)
class GraphFacts:
    """Facts of a forward or a backward graph.

    Attributes:
        kernels: The kernels in execution order.
        stored: Maps each node that is written to memory to the bytes of its buffer.
        at_peak: The buffers in use at the graph's own peak; for a backward, without the forward's outputs.
    """

    kernels: tuple[KernelFacts, ...]
    stored: Mapping[str, int] = field(repr=False)
    at_peak: tuple[BufferFacts, ...] = field(default=(), repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at once."""
        return max((kernel.live_bytes for kernel in self.kernels), default=0)

    @property
    def computed(self) -> frozenset[str]:
        """Names of the nodes that kernels compute, in memory or in registers."""
        return frozenset(name for kernel in self.kernels for name in kernel.nodes)


@dataclass(frozen=True)
class RegionFacts:
    """Facts of both graphs of a plan.

    Attributes:
        peak_bytes: The most bytes in use at once between the start of the forward and the end of the backward.
    """

    forward: GraphFacts
    backward: GraphFacts
    peak_bytes: int


Levels = tuple[tuple[str, int], ...]
"""Pairs of a node's name and the bytes in use while the node's kernel runs, in execution order."""


Plans = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""For each plan, the names of its saved values, and the names of the values that its backward computes twice."""


@dataclass(frozen=True)
class PlainFacts:
    """Memory that plain torch.compile takes for a graph: its own partition, lowered under its own options.

    Attributes:
        forward_peak_bytes, peak_bytes: The most bytes in use at once, in the forward and in both graphs.
        forward, backward: Levels of both graphs, kernel by kernel; empty if the graph contains its own backward.
    """

    forward_peak_bytes: int
    peak_bytes: int
    forward: Levels = ()
    backward: Levels = ()

    @staticmethod
    def of(facts: RegionFacts) -> PlainFacts:
        """Converts the facts of torch's two graphs."""
        forward, backward = (
            tuple((kernel.nodes[0] if kernel.nodes else "", kernel.live_bytes) for kernel in graph.kernels)
            for graph in (facts.forward, facts.backward)
        )
        return PlainFacts(facts.forward.peak_bytes, facts.peak_bytes, forward, backward)


@dataclass(frozen=True)
class Assumptions:
    """Facts of observed plans, to be assumed of the plans that are still to be found.  Each part is sorted by name.

    Attributes:
        stored: Pairs (name, True if the forward writes the value to memory) of pointwise values that are not saved.
        stored_again: Such pairs for the values that the backward recomputes, and for the backward's steps.
        forward_bytes: Pairs (name, bytes in use in the forward while the value is computed, above those that the problem knows).
        backward_bytes: Such pairs in the backward, for recomputed values and for steps.
        plain: Memory that plain torch.compile takes; None if not observed.
        plans: The observed plans; a search continues from each of these plans.
        written: Steps that plans have in memory, but that Inductor left in registers: the graph now marks these steps as written.
    """

    stored: tuple[tuple[str, bool], ...] = ()
    stored_again: tuple[tuple[str, bool], ...] = ()
    forward_bytes: tuple[tuple[str, int], ...] = ()
    backward_bytes: tuple[tuple[str, int], ...] = ()
    plain: PlainFacts | None = None
    plans: Plans = ()
    written: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if no plan was observed, so that the crude rules alone hold."""
        parts = self.stored, self.stored_again, self.forward_bytes, self.backward_bytes, self.written
        return not any(parts)

    def to_text(self) -> str:
        """Returns the text that `from_text` reads."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Assumptions:
        """Reads the text that `to_text` wrote.

        Raises:
            ValueError: `text` is another text.
        """
        return json_values.read_as(Assumptions, json_values.parse(text))


NOTHING_ASSUMED = Assumptions()
"""Assumptions before any plan is observed: the crude rules alone."""
