"""Peak of one plan as Inductor by itself emits it, where nothing keeps its kernels to a plan: what plain torch.compile takes.

`Simulator` is for plans whose kernels run in their order, one by one.  What differs here:

- A fused kernel also computes what a later one computes from the same buffers (``Scheduler.can_fuse_horizontal``): a mask that
  is computed to be saved is written with the activation, and nothing is kept for it.
- No kernel writes over a buffer that two parts of it read; what convolutions alone read is in their order, whatever its shape.
- Kernels in C++ up to the next unfused one are one function (``CppScheduling.flush`` in ``codegen/cpp.py``): all of their outputs
  are allocated before it, and what they read is freed behind it.
- A buffer that is free is kept for a later one of its size, if by Inductor's estimate the peak stays where it is
  (``AllocateLine.should_reuse_buffer`` in ``codegen/wrapper.py``).  That estimate knows nothing of in-place reuse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compile_remat.passes.memory.buffers import Bools, Ints
from compile_remat.passes.memory.plan_kernels import Buffer, Kernel, KernelGraph, backward_kernels, forward_kernels
from compile_remat.passes.memory.simulator import Simulator
from compile_remat.passes.problem.problem import EXTERN, ITEM, POINTWISE, REDUCTION, SCATTER

Groups = Sequence[Sequence[Kernel]]
Levels = Sequence[tuple[str, int]]
"""Names of nodes with the live bytes while their kernels run."""


def plain_peaks(simulator: Simulator, saved: Bools, *, in_groups: bool) -> tuple[int, int]:
    """Peaks, in bytes, of the forward and of both graphs for the plan that saves the values in `saved`, [values].

    Args:
        in_groups: Whether kernels between two unfused ones are called together: in C++.
    """
    forward, backward = plain_levels(simulator, saved, in_groups=in_groups)
    forward_bytes = max(level for _, level in forward)
    return forward_bytes, max([forward_bytes, *(level for _, level in backward)])


def plain_levels(simulator: Simulator, saved: Bools, *, in_groups: bool) -> tuple[Levels, Levels]:
    """Live bytes of forward and backward, kernel by kernel in the order in which they run, each with its node's name."""
    graphs = forward_kernels(simulator, saved), backward_kernels(simulator, saved)
    forward, backward = (_levels(graph, in_groups) for graph in graphs)
    return forward, backward


def _levels(graph: KernelGraph, in_groups: bool) -> Levels:
    groups = _moved_up(_grouped(graph.kernels))
    kernels = [kernel for group in groups for kernel in group]
    if not kernels:
        return [("", int(graph.other_bytes.max(initial=0)))]
    loops = _loops(groups)
    _leave_inside(kernels, loops)
    readers = _readers(kernels)
    _write_over(kernels, loops, readers)
    spans = _spans(graph.buffers, groups if in_groups else [[kernel] for kernel in kernels], readers)
    live = _other_bytes(graph, kernels)
    for buffer, span in spans.items():
        live[span.begin : span.end + 1] += buffer.nbytes
    _keep(spans, _estimate(spans, kernels, loops, readers), live)
    return [(kernel.node.name, int(level)) for kernel, level in zip(kernels, live, strict=True)]


def _other_bytes(graph: KernelGraph, kernels: Sequence[Kernel]) -> Ints:
    """Bytes that are no node's buffer, for each kernel."""
    found, before = np.zeros(len(kernels), dtype=np.int64), 0
    for k, kernel in enumerate(kernels):
        if kernel.slot >= before:
            found[k] = graph.other_bytes[before : kernel.slot + 1].max(initial=0)
            before = kernel.slot + 1
    found[-1] = max(int(found[-1]), int(graph.other_bytes[before:].max(initial=0)))
    return found


# -- what is fused ----------------------------------------------------------------------------------------------------


def _grouped(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Unfused kernels, each alone, and what stands between two of them."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.is_unfused or not groups or groups[-1][0].is_unfused:
            groups.append([])
        groups[-1].append(kernel)
    return groups


def _moved_up(groups: Groups) -> Groups:
    """The groups, with kernels put to the nearest earlier one of which a kernel shares more with them than any of their own."""
    moved = [list(group) for group in groups]
    places = {kernel: number for number, group in enumerate(groups) for kernel in group}
    makers = {buffer: kernel for group in groups for kernel in group for buffer in kernel.writes}
    touching = _touching(kernel for group in groups for kernel in group)
    for number, group in enumerate(groups):
        for kernel in () if group[0].is_unfused else group:
            ready = max((places[makers[b]] if b in makers else 0 for b in kernel.reads), default=number)
            shared: dict[int, int] = {}
            for other in _partners(kernel, touching):
                place = places[other]
                shared[place] = max(shared.get(place, 0), _shared_bytes(kernel, other))
            near = shared.get(number, 0)
            place = max((p for p, nbytes in shared.items() if ready <= p < number and nbytes > near), default=number)
            if place != number:
                moved[number].remove(kernel)
                moved[place].append(kernel)
                places[kernel] = place
    return [group for group in moved if group]


def _loops(groups: Groups) -> dict[Kernel, Kernel]:
    """For each kernel the first one of those that it is fused with."""
    found: dict[Kernel, Kernel] = {}
    for group in groups:
        if group[0].is_unfused:
            found[group[0]] = group[0]
            continue
        awaited, touching = _awaited(group), _touching(group)
        for kernel in group:
            partners = [k for k in _partners(kernel, touching) if k in found and k not in awaited[kernel]]
            leaders = dict.fromkeys(found[partner] for partner in partners)
            found[kernel] = next(iter(leaders), kernel)
            for other in group if len(leaders) > 1 else ():
                if found.get(other) in leaders:
                    found[other] = found[kernel]
    return found


def _leave_inside(kernels: Iterable[Kernel], loops: Mapping[Kernel, Kernel]) -> None:
    """Take away the buffers that no other loops read: what reads them reads what their kernels read."""
    readers = _readers(kernels)
    for kernel in kernels:
        for buffer in [b for b in kernel.writes if b.may_stay_inside]:
            if all(loops[reader] is loops[kernel] for reader in readers.get(buffer, ())):
                kernel.writes.remove(buffer)
                for reader in readers.pop(buffer, ()):
                    reader.reads.remove(buffer)
                    for read in kernel.reads - reader.reads:
                        readers[read].append(reader)
                    reader.reads |= kernel.reads
                if not kernel.writes:
                    for read in kernel.reads:
                        readers[read].remove(kernel)
                    kernel.reads.clear()


def _touching(kernels: Iterable[Kernel]) -> dict[Buffer, list[Kernel]]:
    """The fused kernels that read or write each buffer."""
    found: dict[Buffer, list[Kernel]] = {}
    for kernel in kernels:
        for buffer in () if kernel.is_unfused else (*kernel.reads, *kernel.writes):
            found.setdefault(buffer, []).append(kernel)
    return found


def _partners(kernel: Kernel, touching: Mapping[Buffer, Sequence[Kernel]]) -> list[Kernel]:
    """Kernels of equal loops that read what it reads or writes, or write what it reads."""
    found = dict.fromkeys(k for b in (*kernel.reads, *kernel.writes) for k in touching[b])
    return [k for k in found if k is not kernel and k.elements == kernel.elements]


def _shared_bytes(one: Kernel, other: Kernel) -> int:
    both = (one.reads & other.reads) | (one.reads & set(other.writes)) | (other.reads & set(one.writes))
    return sum(buffer.nbytes for buffer in both)


def _awaited(group: Sequence[Kernel]) -> dict[Kernel, set[Kernel]]:
    """For each kernel, the reductions of its group that it needs the result of, and what these need: no loop has both."""
    makers = {buffer: kernel for kernel in group for buffer in kernel.writes}
    needed: dict[Kernel, set[Kernel]] = {}
    found: dict[Kernel, set[Kernel]] = {}
    for kernel in group:
        direct = {makers[b] for b in kernel.reads if b in makers and makers[b] in needed}
        needed[kernel] = direct.union(*(needed[maker] for maker in direct))
        found[kernel] = set[Kernel]().union(*(found[maker] for maker in direct))
        for maker in direct:
            if maker.node.kernel == REDUCTION:
                found[kernel] |= {maker, *needed[maker]}
    return found


# -- when it is alive -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Span:
    """The first and the last kernel during which a buffer counts; `is_new` where the wrapper allocates it."""

    begin: int
    end: int
    is_new: bool


def _readers(kernels: Iterable[Kernel]) -> dict[Buffer, list[Kernel]]:
    found: dict[Buffer, list[Kernel]] = {}
    for kernel in kernels:
        for buffer in kernel.reads:
            found.setdefault(buffer, []).append(kernel)
    return found


def _write_over(
    kernels: Iterable[Kernel], loops: Mapping[Kernel, Kernel], readers: Mapping[Buffer, Sequence[Kernel]]
) -> None:
    """Say which buffers are written over: by a pointwise kernel that is the last to read them, alone in its loops."""
    for kernel in kernels:
        if kernel.node.kernel != POINTWISE or len(kernel.writes) != 1:
            continue
        (own,) = kernel.writes
        is_ordered = own.node.is_channels_last or _is_for_convolutions(readers.get(own, ()))
        for buffer in sorted(kernel.reads, key=lambda b: b.node.name):
            others = [k for k in readers[buffer] if loops[k] is loops[kernel]]
            is_last = readers[buffer][-1] is kernel and len(others) == 1
            fits = buffer.nbytes == own.nbytes and buffer.node.is_channels_last == is_ordered
            if is_last and fits and not buffer.is_returned and buffer.node.kernel != SCATTER:
                own.over, buffer.is_handed_on = buffer, True
                break


def _is_for_convolutions(readers: Collection[Kernel]) -> bool:
    ordered = [k for k in readers if k.is_unfused and any(b.node.is_channels_last for b in k.writes)]
    return 0 < len(readers) == len(ordered)


def _spans(buffers: Iterable[Buffer], calls: Groups, readers: Mapping[Buffer, Sequence[Kernel]]) -> dict[Buffer, _Span]:
    """When each buffer counts, where the kernels of each of `calls` are called together."""
    position: dict[Kernel, int] = {}
    first: dict[Kernel, int] = {}
    last: dict[Kernel, int] = {}
    for call in calls:
        begin = len(position)
        for kernel in call:
            position[kernel], first[kernel], last[kernel] = len(position), begin, begin + len(call) - 1
    makers = {buffer: kernel for kernel in reversed(position) for buffer in kernel.writes}
    found: dict[Buffer, _Span] = {}
    for buffer in buffers:
        maker = makers.get(buffer)
        if maker is None and not buffer.is_given:
            continue
        begin = 0 if maker is None else position[maker] if buffer.over is not None else first[maker]
        reader = readers[buffer][-1] if buffer in readers else maker
        end = 0 if reader is None else position[reader] - 1 if buffer.is_handed_on else last[reader]
        by_library = buffer.node.kernel == ITEM or (buffer.node.kernel == EXTERN and buffer.node.is_channels_last)
        is_new = maker is not None and buffer.over is None and not by_library
        found[buffer] = _Span(begin, len(position) if buffer.is_returned else end, is_new)
    return found


def _estimate(
    spans: Mapping[Buffer, _Span],
    kernels: Sequence[Kernel],
    loops: Mapping[Kernel, Kernel],
    readers: Mapping[Buffer, Sequence[Kernel]],
) -> Ints:
    """Live bytes by Inductor's own estimate: fused kernels are called one by one, and nothing is written over."""
    low: dict[Kernel, int] = {}
    high: dict[Kernel, int] = {}
    makers: dict[Buffer, int] = {}
    for k, kernel in enumerate(kernels):
        low.setdefault(loops[kernel], k)
        high[loops[kernel]] = k
        for buffer in kernel.writes:
            makers.setdefault(buffer, k)
    found = np.zeros(len(kernels), dtype=np.int64)
    for buffer in spans:
        begin = low[loops[kernels[makers[buffer]]]] if buffer in makers else 0
        last = loops[readers[buffer][-1]] if buffer in readers else loops[kernels[makers.get(buffer, 0)]]
        found[begin : None if buffer.is_returned else high[last] + 1] += buffer.nbytes
    return found


def _keep(spans: Mapping[Buffer, _Span], estimate: Ints, live: Ints) -> None:
    """Add to `live` what is kept between the end of a buffer and the beginning of another one that gets its memory."""
    most = int(estimate.max(initial=0))
    freed = sorted(
        (span.end, b.nbytes) for b, span in spans.items() if not (b.is_given or b.is_returned or b.is_handed_on)
    )
    free: dict[int, list[int]] = {}  # by bytes, the ends of those that are free, the last one freed at the end
    place = 0
    wanted = [(span.begin, buffer.nbytes) for buffer, span in spans.items() if span.is_new]
    for begin, nbytes in sorted(wanted, key=lambda want: want[0]):
        while place < len(freed) and freed[place][0] < begin:
            end, freed_bytes = freed[place]
            free.setdefault(freed_bytes, []).append(end)
            place += 1
        if ends := free.get(nbytes):
            between = slice(ends[-1] + 1, begin)
            if estimate[between].max(initial=0) + nbytes <= most:
                estimate[between] += nbytes
                live[between] += nbytes
                ends.pop()
