"""Facts about the two graphs of one plan, as the code generator lowered them: plain data, whoever observed it.

A `Problem` is built by crude rules: a pointwise value is in registers unless something needs it in memory.  A code generator
decides by more than that, and by other rules in each version.  So a plan's own graphs are lowered, and the facts that come back
replace what was assumed (`Assumptions`, `Problem.with_facts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from compile_remat._util import json_values


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, or one call of an operator.

    Attributes:
        nodes: Names of the graph's nodes that it computes.
        live_bytes: Bytes in use while it runs, with those that it takes for itself.
    """

    nodes: tuple[str, ...]
    live_bytes: int


@dataclass(frozen=True)
class BufferFacts:
    """One buffer that is in use at a peak.

    Attributes:
        node: Name of the node that is in it, or that takes it for itself while it runs.
        is_workspace: Whether a kernel takes it for itself.
    """

    node: str
    nbytes: int
    is_workspace: bool = False


@dataclass(frozen=True)
class GraphFacts:
    """A forward, or a backward.

    Attributes:
        kernels: In the order in which they run.
        stored: For each node that is written to memory, the bytes of its buffer.
        at_peak: The graph's buffers at its own peak; of a backward, without the forward's outputs.
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
        """Names of the nodes that some kernel computes, written to memory or not."""
        return frozenset(name for kernel in self.kernels for name in kernel.nodes)


@dataclass(frozen=True)
class RegionFacts:
    """Both graphs of a plan.

    Attributes:
        peak_bytes: The most bytes in use at once between the start of the forward and the end of the backward.
    """

    forward: GraphFacts
    backward: GraphFacts
    peak_bytes: int


Levels = tuple[tuple[str, int], ...]
"""Names of nodes with the bytes in use while their kernels run, in that order."""


Plans = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""For each plan the names of the values that it saves, and of those that it computes twice in the backward."""


@dataclass(frozen=True)
class PlainFacts:
    """What plain torch.compile takes for a graph: its own partition, lowered under its own options.

    Attributes:
        forward_peak_bytes, peak_bytes: The most bytes in use at once, in the forward and in both graphs.
        forward, backward: Kernel by kernel; empty where the graph holds its backward itself.
    """

    forward_peak_bytes: int
    peak_bytes: int
    forward: Levels = ()
    backward: Levels = ()

    @staticmethod
    def of(facts: RegionFacts) -> PlainFacts:
        """The facts of its two graphs."""
        forward, backward = (
            tuple((kernel.nodes[0] if kernel.nodes else "", kernel.live_bytes) for kernel in graph.kernels)
            for graph in (facts.forward, facts.backward)
        )
        return PlainFacts(facts.forward.peak_bytes, facts.peak_bytes, forward, backward)

    @staticmethod
    def from_object(value: object) -> PlainFacts:
        """What ``dataclasses.astuple`` and JSON made of it.

        Raises:
            ValueError: It is something else.
        """
        parts: list[Any] = value if isinstance(value, list) else []
        if len(parts) != 4 or list(map(type, parts[:2])) != [int, int]:
            raise ValueError("no facts about plain torch.compile")
        return PlainFacts(parts[0], parts[1], _read(parts[2], int), _read(parts[3], int))


@dataclass(frozen=True)
class Assumptions:
    """Facts of plans that were observed, for the plans that are still to be found.  Each part is sorted by name.

    Attributes:
        stored: Pointwise values that are written to memory in the forward though they are not saved, or are not, by name.
        stored_again: The same where they are computed again in the backward, and for the backward's steps.
        forward_bytes: Bytes in use in the forward while a value is computed, above those that the problem knows of.
        backward_bytes: The same in the backward, of values that are computed again and of steps.
        plain: What plain torch.compile takes, where that was observed.
        plans: What the plans save that were observed, and what they compute twice: a search goes on from each of them.
        written: Steps that plans have in memory, and that were left in registers: from now on the graph says that they are written.
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
        """Whether no plan was observed: crude rules alone."""
        return not self.written and not any(getattr(self, name) for name in _PARTS)

    def to_text(self) -> str:
        """As `from_text` reads it."""
        plain = None if self.plain is None else astuple(self.plain)
        parts = [getattr(self, name) for name in _PARTS]
        return json.dumps([*parts, plain, self.plans, self.written], separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Assumptions:
        """What `to_text` wrote.

        Raises:
            ValueError: It is another text.
        """
        parts = json_values.parse(text)
        if not isinstance(parts, list) or len(parts) != len(_PARTS) + 3:
            raise ValueError("no assumptions of this version")
        *parts, plain, plans, written = parts
        return Assumptions(
            **{name: _read(part, kind) for part, (name, kind) in zip(parts, _PARTS.items(), strict=True)},
            plain=None if plain is None else PlainFacts.from_object(plain),
            plans=_read_plans(plans),
            written=_read_names(written),
        )


def _read_names(part: object) -> tuple[str, ...]:
    """Names.

    Raises:
        ValueError: It holds something else.
    """
    names: list[Any] = part if isinstance(part, list) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ValueError("no names of this version")
    return tuple(names)


def _read_plans(part: object) -> Plans:
    """Names by plans.

    Raises:
        ValueError: It holds something else.
    """
    plans: list[Any] = part if isinstance(part, list) else [None]
    if not all(map(_is_pair_of_lists, plans)):
        raise ValueError("no plans of this version")
    return tuple((_read_names(saved), _read_names(again)) for saved, again in plans)


def _is_pair_of_lists(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, list) for each in value)


_PARTS: dict[str, type] = {"stored": bool, "stored_again": bool, "forward_bytes": int, "backward_bytes": int}


def _read(part: Any, kind: type) -> tuple[tuple[str, Any], ...]:
    """One part, whose values are of a type.

    Raises:
        ValueError: It holds something else.
    """
    pairs: list[Any] = part if isinstance(part, list) else [None]
    if not all(isinstance(pair, list) and list(map(type, pair)) == [str, kind] for pair in pairs):
        raise ValueError("no assumptions of this version")
    return tuple((name, value) for name, value in pairs)


NOTHING_ASSUMED = Assumptions()
"""Crude rules alone."""
