"""Regions of a joint graph whose large tensors have rows that are independent of each other.

A region starts at a product that makes rows wider, such as the logits, and grows over large tensors that are computed from the
product or together with it, in forward and backward.  A region ends at sums over rows, such as a weight's gradient, and at
products that make rows narrow, such as the input's gradient.  Small tensors stay outside and are cut into slices or joined from
them: hidden states, the maxima and sums of a softmax, losses of single tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import fx

from compile_remat._torch import joint_graph
from compile_remat.passes.graph.slices.row_rules import NotByRows, Rows, needs, packet_of, passes_on, shape_of, summed

WIDENING = 2
"""Least factor by which a product makes its rows wider to start a region."""


@dataclass
class Region:
    """Nodes to compute in slices.

    Attributes:
        seed: The product that the region starts from.
        rows: Number of rows.
        places: Dimensions of the rows of each node of the region, small nodes between large nodes included.
        edges: Dimensions of the rows of small nodes outside the region that read a large node.
        sums: Nodes that add rows up.
    """

    seed: fx.Node
    rows: int
    places: dict[fx.Node, Rows] = field(default_factory=dict)
    edges: dict[fx.Node, Rows] = field(default_factory=dict)
    sums: list[fx.Node] = field(default_factory=list)

    def is_large(self, node: fx.Node) -> bool:
        """Returns whether a node has over 1/4 of the seed's elements, and over 1.3 times those of the seed's narrow operand."""
        elements = _elements(node)
        return 4 * elements > _elements(self.seed) and 10 * elements > 13 * _elements(_narrow(self.seed))


@dataclass(frozen=True)
class NotSliced:
    """A product whose region cannot be computed in slices.

    Attributes:
        name: Name of the product's node.
        nbytes: Bytes of its result.
        reason: The reason, in words for users.
        is_output: True if the reason is that a large tensor of the region is an output of the graph.
    """

    name: str
    nbytes: int
    reason: str
    is_output: bool = False


class _IsOutput(NotByRows):
    """A large tensor is an output."""


def seeds_of(joint: joint_graph.Joint) -> list[fx.Node]:
    """The products of the forward that make rows wider, largest result first."""
    found = [n for n in joint.module.graph.nodes if joint.info.is_required_fw(n) and _widens(n)]
    return sorted(found, key=lambda n: -nbytes_of(n))


def region_of(joint: joint_graph.Joint, seed: fx.Node, *, at_once: bool = False) -> Region | NotSliced:
    """The region of a product, or the reason why it has none.

    Args:
        at_once: True if forward and backward of a slice are to be computed together: what lies between them is part of the region.
    """
    try:
        rows = Rows(len(shape_of(seed)) - 2, 1)
        region = Region(seed, shape_of(seed)[rows.start], {seed: rows})
        _Growth(joint, region, at_once).run()
    except NotByRows as reason:
        return NotSliced(seed.name, nbytes_of(seed), str(reason), isinstance(reason, _IsOutput))
    if region.rows < 2:
        return NotSliced(seed.name, nbytes_of(seed), f"{seed.name} has {region.rows} row")
    return region


class _Growth:
    """Grows a region from its seed."""

    def __init__(self, joint: joint_graph.Joint, region: Region, at_once: bool) -> None:
        self.joint, self.region, self.at_once = joint, region, at_once
        self.pending = [region.seed]

    def run(self) -> None:
        while self.pending:
            self._grow(self.pending.pop())
        for in_forward in (True, False):
            self._fill(in_forward)
        for node in self.region.places.keys() & self.region.edges.keys():
            del self.region.edges[node]

    def _grow(self, node: fx.Node) -> None:
        if self.joint.user_tags.get(node) == "must_save":
            raise NotByRows(f"{node.name} is tagged MUST_SAVE")
        rows = self.region.places[node]
        for operand, place in needs(node, rows).items():
            if place is not None and operand.op == "call_function" and self.region.is_large(operand):
                self._add(operand, place)
        for user in node.users:
            if user.op == "output":
                self._returned(node)
                continue
            place = passes_on(user, node, rows)
            if place is None:
                self._sum(user, node)
            elif self.region.is_large(user) or _is_several(user):  # only its single outputs can be edges
                self._add(user, place)
            else:
                self._check(user, place)
                self.region.edges[user] = place

    def _returned(self, node: fx.Node) -> None:
        if node in self.joint.fwd_outputs:
            raise _IsOutput(f"{node.name} is an output of the graph")

    def _sum(self, node: fx.Node, source: fx.Node) -> None:
        places = summed(node)
        if places and places[source] != self.region.places[source]:
            raise NotByRows(f"{node.name} mixes rows of {source.name}")
        if node not in self.region.sums:
            self.region.sums.append(node)
        for operand, place in places.items():
            if operand.op == "call_function" and self.region.is_large(operand):
                self._add(operand, place)

    def _add(self, node: fx.Node, rows: Rows) -> None:
        known = self.region.places.get(node)
        if known is not None:
            if known != rows:
                raise NotByRows(f"{node.name} is read with its rows in two places")
            return
        self._check(node, rows)
        self.region.places[node] = rows
        self.pending.append(node)

    def _check(self, node: fx.Node, rows: Rows) -> None:
        if math.prod(shape_of(node)[rows.start : rows.start + rows.length]) != self.region.rows:
            raise NotByRows(f"{node.name} has another number of rows")

    def _fill(self, in_forward: bool) -> None:
        """Add the small nodes on paths between nodes of the region: of the forward, or outside of the forward, or all at once."""
        inside = [n for n in self.region.places if self._is_of(n, in_forward)]
        below, above = set(inside), set(inside)
        for node in self.joint.module.graph.nodes:
            if self._is_of(node, in_forward) and not below.isdisjoint(node.all_input_nodes):
                below.add(node)
        for node in reversed(self.joint.module.graph.nodes):
            if self._is_of(node, in_forward) and not above.isdisjoint(node.users):
                above.add(node)
        between = below & above
        for node in self.joint.module.graph.nodes:
            if node in between and node not in self.region.places:
                self.region.places[node] = self._between(node)

    def _is_of(self, node: fx.Node, in_forward: bool) -> bool:
        return node.op == "call_function" and (self.at_once or self.joint.info.is_required_fw(node) is in_forward)

    def _between(self, node: fx.Node) -> Rows:
        found = {self._passed_on(node, x) for x in node.all_input_nodes if x in self.region.places}
        if len(found) != 1 or node in self.region.sums:
            raise NotByRows(f"{packet_of(node)} ({node.name}) needs all rows at once")
        (place,) = found
        wanted = needs(node, place)
        for operand, rows in wanted.items():
            if operand in self.region.places and self.region.places[operand] != rows:
                raise NotByRows(f"{node.name} is read with its rows in two places")
        return place

    def _passed_on(self, node: fx.Node, source: fx.Node) -> Rows:
        place = passes_on(node, source, self.region.places[source])
        if place is None:
            raise NotByRows(f"{packet_of(node)} ({node.name}) adds up rows from which {source.name} is computed again")
        return place


def _widens(node: fx.Node) -> bool:
    if packet_of(node) not in ("aten.mm", "aten.addmm", "aten.bmm"):
        return False
    return _elements(node) >= WIDENING * _elements(_narrow(node)) > 0


def _narrow(product: fx.Node) -> fx.Node:
    """The operand that has a product's rows."""
    operand = product.args[1 if packet_of(product) == "aten.addmm" else 0]
    assert isinstance(operand, fx.Node)
    return operand


def _is_several(node: fx.Node) -> bool:
    """Returns whether a node has several outputs."""
    return isinstance(node.meta.get("val"), list | tuple)


def _elements(node: fx.Node) -> int:
    """Number of elements of a node's tensor, or of its largest output; 0 if its sizes are not known."""
    try:
        elements = math.prod(shape_of(node))
    except NotByRows:
        return 0
    return max(value.numel() for value in node.meta["val"]) if _is_several(node) else elements


def nbytes_of(node: fx.Node) -> int:
    """Bytes of a node's tensor; 0 if its sizes are not known."""
    return _elements(node) * int(node.meta["val"].dtype.itemsize) if _elements(node) else 0
