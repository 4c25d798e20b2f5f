"""The forms in which one joint graph can be planned: whole, and with the rows of its largest temporaries in 2, 4, 8, ... slices.

Slices have two forms: gradients in the backward, which computes the rows again, or in the forward, to be scaled in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from compile_remat._util.units import format_bytes
from compile_remat.passes import SlicedProduct
from compile_remat.passes.graph.slices.largest import NotSliced, SlicedGraph, slice_largest, slice_products
from compile_remat.planning.joint_problem import JointModule
from compile_remat.planning.settings import SLICES

NUMBERS = (2, 4, 8, 16, 32, 64)
"""The numbers of slices that `auto` tries."""


@dataclass(frozen=True)
class Variant:
    """One form of a joint graph.

    Attributes:
        products: The products whose rows are computed in slices; empty for the whole graph.
        left: Large products whose rows could not be computed in slices, with the reasons.
        is_whole: True for the graph as torch gave it.
        number: The number of slices of the largest product; 1 for none, or where the products were given.
    """

    graph: JointModule
    products: tuple[SlicedProduct, ...] = ()
    left: tuple[NotSliced, ...] = ()
    is_whole: bool = True
    number: int = 1


class Variants:
    """The variants of a joint graph, made one by one.  Planning rewrites the graph of a variant, so each has its own.

    Args:
        graph: The graph as torch gave it, which becomes that of the whole variant.
        slices: The setting: the number of slices; 1 for none, 0 (`auto`) for each number of `NUMBERS`.
        is_on_cpu: True if the graph was traced on a CPU, whatever device its tensors claim to be on after planning.
    """

    def __init__(self, graph: JointModule, slices: int, *, is_on_cpu: bool = False) -> None:
        self.slices, self.is_on_cpu = slices, is_on_cpu
        self.whole = Variant(graph)
        self._given = graph if slices == SLICES["off"] else graph.copied()

    def sliced(self) -> Iterator[Variant]:
        """Yields the graph in slices, with more of them from one variant to the next."""
        if self.slices == SLICES["off"]:
            return
        for number in NUMBERS if self.slices == SLICES["auto"] else (self.slices,):
            yield self._variant(partial(slice_largest, slices=number), number)

    def at_once(self, numbers: Sequence[int] = NUMBERS) -> Iterator[Variant]:
        """Yields the graph in these numbers of slices, which compute gradients in the forward; nothing where none can."""
        for number in numbers:
            variant = self._variant(partial(slice_largest, slices=number, at_once=True), number)
            if not any(product.at_once for product in variant.products):
                return
            yield variant

    def with_products(self, products: tuple[SlicedProduct, ...]) -> Variant:
        """Returns the graph with exactly these products in slices, as far as it has them."""
        return self._variant(partial(slice_products, products=products))

    def _variant(self, rewrite: Callable[..., SlicedGraph], number: int = 1) -> Variant:
        """Returns a copy of the graph after `rewrite`, which takes the module and how to tell outputs from gradients."""
        graph = self._given.copied(is_on_cpu=self.is_on_cpu)
        sliced = rewrite(
            graph.module,
            num_fwd_outputs=graph.num_fwd_outputs,
            static_lifetime_input_indices=graph.static_lifetime_input_indices,
        )
        return Variant(replace(self._given, module=sliced.module), sliced.products, sliced.left, False, number)


# -- the choice of one variant -------------------------------------------------------------------------------------------

SAME_PEAK = 0.99
"""Where no plan fits, a slower one is taken only if its peak is below this share of the best one so far, and a faster one if
the best peak is not below this share of its own."""


@dataclass(frozen=True)
class Candidate:
    """The figures of a plan by which numbers of slices are compared.

    Attributes:
        peak_bytes: The plan's peak, or if no plan fits, the lowest peak.
        time_ns: The estimated time of forward and backward under the plan; 0 if no plan fits.
        is_met: True if the plan keeps the requested budget or target; False if the lowest peak is requested.
    """

    peak_bytes: int
    time_ns: int
    is_met: bool


def is_slower(found: Sequence[Candidate]) -> bool:
    """Returns True if more slices help no further: the last plan keeps the budget, and so does one with fewer slices, as fast."""
    times = [plan.time_ns for plan in found if plan.is_met]
    return found[-1].is_met and len(times) > 1 and times[-1] >= times[-2]


def best_of(found: Sequence[Candidate]) -> int:
    """Returns the position of the fastest plan that keeps the budget; if none does, of the lowest plan with the fewest slices.

    A faster plan counts as lower if the other is not below `SAME_PEAK` of it.
    """
    kept = [k for k, plan in enumerate(found) if plan.is_met]
    if kept:
        return min(kept, key=lambda k: found[k].time_ns)
    best = 0
    for k, plan in enumerate(found):
        other = found[best]
        is_faster = 0 < plan.time_ns < other.time_ns and SAME_PEAK * plan.peak_bytes <= other.peak_bytes
        if is_faster or plan.peak_bytes < SAME_PEAK * other.peak_bytes:
            best = k
    return best


def reasons_of(left: Sequence[NotSliced], *, is_whole: bool) -> str:
    """Returns the reasons why products are not computed in slices; if other rows are, only the refusals of graph outputs.

    Args:
        is_whole: True if no rows of the graph are in slices.
    """
    return "; ".join(_reason_of(refusal) for refusal in left if refusal.is_output or is_whole)


def _reason_of(refusal: NotSliced) -> str:
    if refusal.is_output:
        return f"logits are an output: {format_bytes(refusal.nbytes)} cannot be sliced; return the loss alone"
    return f"{refusal.name}: {format_bytes(refusal.nbytes)} cannot be sliced: {refusal.reason}"
