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
) -> SlicedGraph:
    """Compute the largest product in `slices` slices, and each other product in as many as keep its slices at most as large.

    Args:
        module: A joint graph; rewritten in place.
    """

    def slices_by_size(seed: fx.Node, largest_bytes: int) -> int:
        return -(-nbytes_of(seed) * slices // largest_bytes)

    return _sliced(module, slices_by_size, num_fwd_outputs, static_lifetime_input_indices)


def slice_products(
    module: fx.GraphModule,
    products: Sequence[SlicedProduct],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> SlicedGraph:
    """Compute the regions of `products`, and no others, in slices; the graph is rewritten in place."""
    known = {product.name: product.slices for product in products}

    def slices_by_name(seed: fx.Node, largest_bytes: int) -> int:
        return known.get(seed.name, 1)

    return _sliced(module, slices_by_name, num_fwd_outputs, static_lifetime_input_indices)


def _sliced(
    module: fx.GraphModule,
    slices_of_seed: Callable[[fx.Node, int], int],
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None,
) -> SlicedGraph:
    def prepared() -> joint_graph.Joint:
        return joint_graph.prepare(
            module, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static_lifetime_input_indices
        )

    joint, products, left = prepared(), list[SlicedProduct](), list[NotSliced]()
    module = joint.module
    if joint.has_backward and select_rows_first(module):
        joint = prepared()
    seeds = seeds_of(joint) if joint.has_backward else []
    wanted = {seed.name: slices_of_seed(seed, nbytes_of(seeds[0])) for seed in seeds}
    for name, slices in wanted.items():
        seed = next((n for n in joint.module.graph.nodes if n.name == name), None)
        if slices < 2 or seed is None:  # None: the product is inside of another region
            continue
        refusal = slice_region(joint, seed, slices)
        if refusal is not None:
            left.append(refusal)
            continue
        products.append(SlicedProduct(name, slices))
        module = joint.module
        joint = prepared()
    return SlicedGraph(joint.module, tuple(products), tuple(left))
