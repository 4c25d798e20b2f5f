"""A scheduler's nodes before any are joined, as kernels: what each reads and writes, who makes and reads a buffer, and bytes.

The fusion guard and the order of kernels both work on it.  Buffers and nodes are known by their names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

OF_THE_CALLER = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents")
"""How inputs are called that die with their caller and not with their last reader."""


class Access(NamedTuple):
    """What a node of the scheduler does with buffers, by their names.

    Attributes:
        reads: What it reads.
        places: Those of its reads that it may be written over: it reads the very element that it writes, not a slice of a larger
            tensor, say (``SchedulerNode.can_inplace``); and what a scatter writes into.
        writes: What it makes.
    """

    reads: frozenset[str]
    places: frozenset[str]
    writes: frozenset[str]

    @staticmethod
    def of(node: Any) -> Access:
        """Of a node of the scheduler that is not joined."""
        reads, outputs = node.read_writes.reads, node.get_outputs()
        places = {dep.name for dep in reads if node.can_inplace(dep)}
        return Access(
            frozenset(dep.name for dep in reads),
            frozenset(places.union(*(buffer.get_mutations() for buffer in outputs))),
            frozenset(buffer.get_name() for buffer in outputs),
        )


@dataclass(frozen=True, eq=False)
class Kernel:
    """One kernel, or several that are joined.

    Attributes:
        nodes: Names of its scheduler nodes.
        first: Where the first of them stood in the plan's order.
        last: Where the last of them stood.
        reads: Names of buffers and inputs that come from elsewhere.
        writes: Names of buffers that it makes.
        accesses: What each of its nodes reads, may write over and writes; empty for a kernel that is not Inductor's own.
    """

    nodes: frozenset[str]
    first: int
    last: int
    reads: frozenset[str]
    writes: frozenset[str]
    accesses: tuple[Access, ...]

    @staticmethod
    def of(nodes: Sequence[Any]) -> Kernel:
        """The kernel that runs these nodes of the scheduler."""
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
        size_hint: The scheduler's ``dep_size_hint``: bytes that a dependency reads or writes.
        returned: Names of the buffers that the graph returns.

    Attributes:
        maker: For each buffer, the node that writes it.
        readers: For each buffer or input, the nodes that read it, in order.
        nbytes: Bytes of each buffer or input.
        scattered: Buffers that are others with elements written into them: Inductor writes no kernel's output over such.
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
        """Bytes of some buffers together."""
        return sum(self.nbytes.get(name, 0) for name in names)

    def outlives(self, name: str) -> bool:
        """Whether a buffer or input stays when its last reader has run: it is returned, or the caller's."""
        return name in self.returned or (name not in self.maker and name.startswith(OF_THE_CALLER))

    def has_extern_between(self, low: int, high: int) -> bool:
        """Whether an unfused kernel (matmul, convolution, attention) stands strictly between two places."""
        following = bisect_right(self._externs, low)
        return following < len(self._externs) and self._externs[following] < high

    def peak_bytes(
        self, kernels: Iterable[Kernel], made: Callable[[Kernel], Set[str]], freed: Callable[[Kernel], Set[str]]
    ) -> int:
        """The most in use while `kernels` run one after the other, above what was when the first of them began.

        Args:
            made: The buffers that a kernel allocates.
            freed: What it is the last to read.
        """
        level = peak = 0
        for kernel in kernels:
            written, released = made(kernel), freed(kernel)
            reused = reused_bytes(kernel, written, released - self.scattered, self.nbytes)
            level += self.bytes_of(written) - reused
            peak = max(peak, level)
            level += reused - self.bytes_of(released)
        return peak


def reused_bytes(kernel: Kernel, made: Set[str], freed: Set[str], nbytes: Mapping[str, int]) -> int:
    """In-place reuse: bytes that the kernel writes over what its nodes read in place, which is of one size and not read later."""
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
                    left.add(name)  # a value inside the kernel: what is made of it may take the same place
    return total


def _reads_beside(accesses: Sequence[Access], place: int) -> Iterator[frozenset[str]]:
    """What the nodes of a kernel read that one of them does not need: over that Inductor does not let it write.

    Of two nodes that read a buffer neither may be written over it, unless the second one waits for the first
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
