"""Names of graphs that are the same on all ranks of one program, even if one rank compiles more graphs than the others."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from compile_remat._torch.cache_key_text import shared_lines
from compile_remat._torch.ranks.groups import Frame


@dataclass(frozen=True)
class Place:
    """The place of a graph in the program.

    Attributes:
        name: The function that Dynamo compiled, and the number of its graph.
        is_first: True if the graph belongs to the function's first variant with a backward, which every rank of the program
            compiles.  Later variants are compiled when sizes change, on one rank and not on another.
    """

    name: str
    is_first: bool


class Places:
    """Counts the graphs of one process, function by function, so that a graph that one rank compiles alone shifts no name.

    A function is compiled to several graphs at once if torch cuts it at DDP's buckets.  Dynamo numbers its variants, from the
    start again after ``torch.compiler.reset()``.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        self._variants: dict[str, tuple[int, int]] = {}  # first variant since the last reset, and last variant
        self._graphs: dict[tuple[str, int], itertools.count[int]] = {}

    def next(self, frame: Frame) -> Place:
        """Returns the place of the next graph, which belongs to `frame`."""
        first, last = self._variants.get(frame.code, (frame.variant, frame.variant))
        if frame.code not in self._rounds or frame.variant < last:
            self._rounds[frame.code] = self._rounds.get(frame.code, 0) + 1
            first = frame.variant
        self._variants[frame.code] = first, frame.variant
        number = self._rounds[frame.code]
        is_first = frame.variant == first
        graph = next(self._graphs.setdefault((frame.code, number), itertools.count())) if is_first else 0
        return Place(f"{frame.code} #{number}.{graph}", is_first)


def graph_name(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """Returns a hash of a Dynamo graph and its inputs, equal on ranks that run the same program on the same sizes."""
    return hashlib.sha256("\n".join(shared_lines(gm, example_inputs)).encode()).hexdigest()[:16]
