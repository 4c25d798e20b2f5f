"""Allocations of one step of a compiled region: dry runs of its forward's and its backward's code, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from compile_remat._torch.sizes import in_blocks, storage_nbytes
from compile_remat.compilation.region_facts import graph_facts
from compile_remat.cost_models import Event, Reservation, reservation_of
from compile_remat.device import free_memory
from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_dry_run import DryRun, NotUnderstood, dry_run
from compile_remat.passes import GraphFacts, RegionFacts

STEPS = 3
"""Number of steps in the replay of the allocator; the second step may find the segments of the first step cut up."""


@dataclass(frozen=True)
class RegionRun:
    """A dry run of a forward and of its backward.

    Attributes:
        live_bytes: The most bytes live at once between the entry of the forward and the end of the backward.
        events: Allocations and frees of both graphs in order: a storage by any key and its bytes, or 0 for a free.
        held: Bytes of each input tensor of the forward, parameters and buffers among them.
        is_cuda: True if torch's CUDA allocator serves the region.
        forward, backward: Facts of the two graphs; None unless the graphs were read before their code was made.
    """

    live_bytes: int
    events: tuple[Event, ...]
    held: tuple[int, ...] = ()
    is_cuda: bool = False
    forward: GraphFacts | None = field(default=None, repr=False)
    backward: GraphFacts | None = field(default=None, repr=False)

    @property
    def facts(self) -> RegionFacts | None:
        """Facts of both graphs; None if the code came out of a cache or was already emitted."""
        if self.forward is None or self.backward is None:
            return None
        return RegionFacts(self.forward, self.backward, self.peak_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes in use at once; on CUDA counted in the allocator's blocks, some of which exceed the requested bytes."""
        return max(self.live_bytes, self.reservation.allocated_peak_bytes) if self.is_cuda else self.live_bytes

    @cached_property
    def reservation(self) -> Reservation:
        """The reservation of torch's CUDA allocator for `STEPS` such steps, under the allocator's options at the first access."""
        expandable = free_memory.has_expandable_segments()
        return reservation_of(self.events, steps=STEPS, expandable=expandable, held=self.held)


def run_unsplit(graph: Emitted) -> RegionRun:
    """Run a graph that was not split into forward and backward.

    Raises:
        NotUnderstood: The dry run cannot follow the code.
    """
    run = dry_run(graph.source_code, graph.inputs)
    return _of_inputs(graph, run.peak_bytes, tuple((("forward", s), n) for s, n in run.events))


def run_region(forward: Emitted, backward: Emitted) -> RegionRun:
    """Run the codes of a forward and of its backward dry.

    The forward's outputs count until the backward ends, as a training loop holds them; saved tensors count until the backward
    drops them.  Inputs of the forward and tangents do not count, as the compiled graphs do not allocate them.  But if the backward
    reads an output itself, no loop can drop this output before its tangent exists: then output and tangent both count.

    Raises:
        NotUnderstood: A dry run cannot follow the code, or the two graphs do not belong together.
    """
    first = dry_run(forward.source_code, forward.inputs)
    outputs, saved = _split(forward, backward, first)
    held = dict(filter(None, outputs))
    counted: dict[int, tuple[int, int]] = {}
    read_again: list[int] = []  # bytes of outputs that are saved as well
    for position, name in enumerate(backward.names):
        storage = saved.get(name)
        if storage is not None and storage[0] not in held:
            counted[position] = storage
        elif storage is not None:
            read_again.append(storage[1])
    for position, nbytes in _tangents(backward):
        if nbytes in read_again:
            read_again.remove(nbytes)
            counted[position] = (-1 - position, nbytes)  # a number that no storage of the forward has
    second = dry_run(backward.source_code, backward.inputs, counted)
    live_bytes = max(first.peak_bytes, sum(held.values()) + second.peak_bytes)
    numbers = {-1 - storage: ("forward", storage) for storage, _ in counted.values() if storage >= 0}
    events = (*((("forward", s), n) for s, n in first.events), *_later(second, numbers))
    run = _of_inputs(forward, live_bytes, events)
    if not (forward.nodes_of and backward.nodes_of):
        return run
    outputs_bytes = sum(held.values())
    return replace(run, forward=graph_facts(forward, first), backward=graph_facts(backward, second, outputs_bytes))


def _of_inputs(forward: Emitted, live_bytes: int, events: tuple[Event, ...]) -> RegionRun:
    tensors = [value for value in forward.inputs if isinstance(value, torch.Tensor)]
    held = tuple(filter(None, map(storage_nbytes, tensors)))
    return RegionRun(live_bytes, events, held, any(tensor.device.type == "cuda" for tensor in tensors))


def _later(backward: DryRun, numbers: Mapping[int, tuple[str, int]]) -> Iterator[Event]:
    """Yields the backward's events, without the allocation of saved activations; `numbers` has the forward's keys of these."""
    there = set(numbers)
    for storage, nbytes in backward.events:
        if nbytes and storage in there:
            continue
        (there.add if nbytes else there.discard)(storage)
        yield numbers.get(storage, ("backward", storage)), nbytes


def _tangents(backward: Emitted) -> list[tuple[int, int]]:
    """Positions of the incoming gradients, and their bytes."""
    found = [(k, backward.inputs[k]) for k, name in enumerate(backward.names) if name.startswith("tangents_")]
    return [(k, in_blocks(storage_nbytes(t), t.device.type)) for k, t in found if isinstance(t, torch.Tensor)]


def _split(
    forward: Emitted, backward: Emitted, run: DryRun
) -> tuple[list[tuple[int, int] | None], dict[str, tuple[int, int] | None]]:
    """Storages of the user's outputs, and of the saved tensors by their names in the backward.

    The forward returns outputs, then saved tensors, then saved sizes; the backward takes sizes, tensors, tangents.
    """
    handed = [k for k, name in enumerate(backward.names) if not name.startswith("tangents_")]
    sizes = [k for k in handed if isinstance(backward.inputs[k], int | torch.SymInt)]
    tensors = [k for k in handed if k not in sizes]
    num_outputs = forward.num_outputs - len(handed)
    if num_outputs < 0 or len(run.returned) != forward.num_outputs:
        raise NotUnderstood("forward and backward do not hand over the same values")
    handed_storages = run.returned[num_outputs : num_outputs + len(tensors)]
    saved = {backward.names[k]: storage for k, storage in zip(tensors, handed_storages, strict=True)}
    return list(run.returned[:num_outputs]), saved
