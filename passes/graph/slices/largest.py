"""A joint graph with the rows of its largest products in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.slices.regions import NotSliced as NotSliced
from compile_remat.passes.graph.slices.regions import nbytes_of, seeds_of
from compile_remat.passes.graph.slices.selections import select_rows_first
from compile_remat.passes.graph.slices.slicing import slice_region
from compile_remat.passes.problem.plan import SlicedProduct


@dataclass(frozen=True)
class SlicedGraph:
    """A joint graph with sliced calls.

    Attributes:
        module: The graph.
        products: The products whose regions are computed in slices.
        left: The products whose regions are not, with the reasons.
    """

    module: fx.GraphModule
    products: tuple[SlicedProduct, ...]
    left: tuple[NotSliced, ...]


def slice_largest(
    module: fx.GraphModule,
    slices: int,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    at_once: bool = False,
) -> SlicedGraph:
    """Compute the largest product in `slices` slices, and each other product in as many as keep its slices at most as large.

    Args:
        module: A joint graph; rewritten in place.
        at_once: True to compute gradients in the forward where the backward can scale them.
    """

    def products_by_size(seed: fx.Node, largest_bytes: int) -> list[SlicedProduct]:
        number = -(-nbytes_of(seed) * slices // largest_bytes)
        return [SlicedProduct(seed.name, number, is_first) for is_first in (True, False)[not at_once :]]

    return _sliced(module, products_by_size, num_fwd_outputs, static_lifetime_input_indices)


def slice_products(
    module: fx.GraphModule,
    products: Sequence[SlicedProduct],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> SlicedGraph:
    """Compute the regions of `products`, and no others, in slices; the graph is rewritten in place."""
    known = {product.name: product for product in products}

    def products_by_name(seed: fx.Node, largest_bytes: int) -> list[SlicedProduct]:
        return [known[seed.name]] if seed.name in known else []

    return _sliced(module, products_by_name, num_fwd_outputs, static_lifetime_input_indices)


def _sliced(
    module: fx.GraphModule,
    products_of_seed: Callable[[fx.Node, int], list[SlicedProduct]],
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None,
) -> SlicedGraph:
    """Compute each seed's region in the first of the ways in `products_of_seed` that is possible."""

    def prepared() -> joint_graph.Joint:
        return joint_graph.prepare(
            module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
        )

    joint, products, left = prepared(), list[SlicedProduct](), list[NotSliced]()
    module = joint.module
    if joint.has_backward and select_rows_first(module):
        joint = prepared()
    seeds = seeds_of(joint) if joint.has_backward else []
    for ways in [products_of_seed(seed, nbytes_of(seeds[0])) for seed in seeds]:
        done, refusal = _first_possible(joint, ways)
        if refusal is not None:
            left.append(refusal)
        if done is None:
            continue
        products.append(done)
        module = joint.module
        joint = prepared()
    return SlicedGraph(joint.module, tuple(products), tuple(left))


def _first_possible(
    joint: joint_graph.Joint, ways: Sequence[SlicedProduct]
) -> tuple[SlicedProduct | None, NotSliced | None]:
    """Compute a region in the first way that is possible; returns this way, or the reason why the last one is not possible."""
    refusal = None
    for way in ways:
        seed = next((n for n in joint.module.graph.nodes if n.name == way.name), None)
        if way.slices < 2 or seed is None:  # None: the product is inside of another region
            continue
        refusal = slice_region(joint, seed, way.slices, at_once=way.at_once)
        if refusal is None:
            return way, None
    return None, refusal
