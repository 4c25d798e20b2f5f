"""A scheduler's nodes before any fusion, as kernels: the buffers of each node; the writer, readers and bytes of each buffer.

The fusion guard and the kernel order both use this graph.  Names identify buffers and nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

OF_THE_CALLER = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents")
"""Prefixes of inputs that the caller keeps alive, so that they do not die with their last reader."""


class Access(NamedTuple):
    """Names of the buffers that a scheduler node accesses.

    Attributes:
        reads: Buffers that the node reads.
        places: Buffers that the node may overwrite: it reads the very element that it writes, not a slice of a larger tensor, say
            (``SchedulerNode.can_inplace``); and buffers that a scatter writes into.
        writes: Buffers that the node makes.
    """

    reads: frozenset[str]
    places: frozenset[str]
    writes: frozenset[str]

    @staticmethod
    def of(node: Any) -> Access:
        """The accesses of a scheduler node that is not fused."""
        reads, outputs = node.read_writes.reads, node.get_outputs()
        places = {dep.name for dep in reads if node.can_inplace(dep)}
        return Access(
            frozenset(dep.name for dep in reads),
            frozenset(places.union(*(buffer.get_mutations() for buffer in outputs))),
            frozenset(buffer.get_name() for buffer in outputs),
        )


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, or several fused kernels.

    Attributes:
        nodes: Names of the kernel's scheduler nodes.
        first: Position of the first of these nodes in the plan's order.
        last: Position of the last of these nodes in the plan's order.
        reads: Names of the inputs and buffers that the kernel reads and does not make.
        writes: Names of the buffers that the kernel makes.
        accesses: Accesses of each of these nodes; empty for a kernel that is not Inductor's own.
    """

    nodes: frozenset[str]
    first: int
    last: int
    reads: frozenset[str]
    writes: frozenset[str]
    accesses: tuple[Access, ...]

    @staticmethod
    def of(nodes: Sequence[Any]) -> Kernel:
        """The kernel that runs these scheduler nodes."""
        accesses = [Access.of(node) for node in nodes]
        writes = frozenset().union(*(access.writes for access in accesses))
        reads = frozenset().union(*(access.reads for access in accesses)) - writes
        orders = [node.min_order for node in nodes]
        own = () if any(node.is_extern() or node.is_template() for node in nodes) else tuple(accesses)
        return Kernel(frozenset(n.get_name() for n in nodes), min(orders), max(orders), reads, writes, own)


class SchedulerGraph:
    """The nodes of a scheduler and their buffers.

    Args:
        nodes: The nodes, in a topological order.
        size_hint: The scheduler's ``dep_size_hint``: returns the bytes that a dependency reads or writes.
        returned: Names of the buffers that the graph returns.

    Attributes:
        maker: For each buffer, the node that writes it.
        readers: For each buffer or input, the nodes that read it, in order.
        nbytes: Bytes of each buffer or input.
        scattered: Buffers that result from a write into another buffer: Inductor never reuses them in place.
    """

    def __init__(self, nodes: Sequence[Any], size_hint: Callable[[Any], Any], returned: Iterable[str]) -> None:
        self.nodes, self.returned = nodes, frozenset(returned)
        self.maker: dict[str, str] = {}
        self.readers: dict[str, list[str]] = {}
        self.nbytes: dict[str, int] = {}
        self.scattered: set[str] = set()
        self._externs = sorted(node.min_order for node in nodes if node.is_extern())
        for node in nodes:
            name = node.get_name()
            parts = node.get_nodes()
            outputs = [buffer for part in parts for buffer in part.get_outputs()]
            self.maker.update((buffer.get_name(), name) for buffer in outputs)
            self.scattered.update(buffer.get_name() for buffer in outputs if buffer.get_mutations())
            for read in {dep.name for part in parts for dep in part.read_writes.reads}:
                self.readers.setdefault(read, []).append(name)
            for part in parts:
                for dep in (*part.read_writes.reads, *part.read_writes.writes):
                    self.nbytes[dep.name] = max(self.nbytes.get(dep.name, 0), int(size_hint(dep)))

    def bytes_of(self, names: Iterable[str]) -> int:
        """Total bytes of the named buffers; an unknown name counts as 0."""
        return sum(self.nbytes.get(name, 0) for name in names)

    def outlives(self, name: str) -> bool:
        """True if a buffer or input outlives its last reader: the graph returns it, or the caller holds it."""
        return name in self.returned or (name not in self.maker and name.startswith(OF_THE_CALLER))

    def has_extern_between(self, low: int, high: int) -> bool:
        """True if an unfused kernel (matmul, convolution, attention) stands strictly between two positions."""
        following = bisect_right(self._externs, low)
        return following < len(self._externs) and self._externs[following] < high

    def peak_bytes(
        self, kernels: Iterable[Kernel], made: Callable[[Kernel], Set[str]], freed: Callable[[Kernel], Set[str]]
    ) -> int:
        """Peak bytes while `kernels` run one after the other, above the bytes in use before the first of them; see `levels`."""
        return max((peak for _, _, peak in self.levels(kernels, made, freed)), default=0)

    def levels(
        self, kernels: Iterable[Kernel], made: Callable[[Kernel], Set[str]], freed: Callable[[Kernel], Set[str]]
    ) -> Iterator[tuple[Kernel, int, int]]:
        """Yields each kernel, with the bytes in use before it and while it runs, above the bytes in use before the first of them.

        Args:
            made: Returns the buffers that a kernel allocates.
            freed: Returns the buffers that a kernel is the last to read.
        """
        level = 0
        for kernel in kernels:
            written, released = made(kernel), freed(kernel)
            reused = reused_bytes(kernel, written, released - self.scattered, self.nbytes)
            peak = level + self.bytes_of(written) - reused
            yield kernel, level, peak
            level = peak + reused - self.bytes_of(released)


def reused_bytes(kernel: Kernel, made: Set[str], freed: Set[str], nbytes: Mapping[str, int]) -> int:
    """In-place reuse: bytes of outputs that the kernel writes over `freed` buffers of the same size, read in place by its nodes."""
    left, total = set(freed), 0
    for place, access in enumerate(kernel.accesses):
        last = access.places.difference(*_reads_beside(kernel.accesses, place))
        for name in sorted(access.writes):
            found = next((old for old in sorted(last & left) if nbytes.get(old, 0) == nbytes.get(name, 0)), None)
            if found is not None:
                left.discard(found)
                if name in made:
                    total += nbytes.get(found, 0)
                else:
                    left.add(name)  # a value inside the kernel: its reader may reuse the same place
    return total


def _reads_beside(accesses: Sequence[Access], place: int) -> Iterator[frozenset[str]]:
    """Yields the reads of a kernel's nodes that the node at `place` does not depend on: Inductor does not let it overwrite these.

    Two nodes that read the same buffer cannot overwrite it, unless the second node depends on the first
    (``SchedulerNode.decide_inplace_update``).
    """
    needed = set(accesses[place].reads)
    for earlier in reversed(accesses[:place]):
        if earlier.writes & needed:
            needed |= earlier.reads
        else:
            yield earlier.reads
    for later in accesses[place + 1 :]:
        yield later.reads
