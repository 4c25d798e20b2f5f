"""Links between devices, and the time of a collective over them, by an alpha-beta model of rings.

A ring of n devices passes 1/n of the bytes n - 1 times (an all-reduce twice as often): each pass costs the latency of a hop
(alpha), and all passes together cost the moved bytes over the bandwidth (beta).  `links.json` beside this module has the figures,
each with its source.  Each device has a network adapter of its own, so a ring with k devices in a node crosses to the next node
over k adapters.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from compile_remat._util.suggestions import did_you_mean
from compile_remat.errors import DeviceError

_TABLE = Path(__file__).with_name("links.json")

START_NS = 8_400
"""Time in ns of a collective before its first hop: NCCL, src/graph/tuning.cc, baseLat of the ring and the simple protocol."""

EFFICIENCY = 0.8
"""Fraction of a link's published bandwidth that large collectives reach: assumed, not measured, like those of kernels."""


class CollectiveKind(StrEnum):
    """Kinds of collective operations of a group of ranks."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class Link:
    """A kind of link.

    Attributes:
        kind: NVLink, PCIe or InfiniBand.
        bandwidth_bytes_per_s: Bandwidth of one device, in one direction.
        hop_ns: Latency of one hop of a ring.
        sources: The documents that the figures come from.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: int
    hop_ns: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """The links of a cluster.

    Attributes:
        inside: The link between the devices of a node.
        between: The link from node to node; None if no network is known.
        node_size: Number of devices in a node.
    """

    inside: Link
    between: Link | None
    node_size: int

    def time_ns(self, kind: CollectiveKind, nbytes: int, ranks: Sequence[int]) -> int:
        """Estimated time of one collective.

        Args:
            nbytes: Bytes of the whole tensor: the output of an all-gather, the input of a reduce-scatter or an all-reduce.
            ranks: Ranks of the group, in the order of devices; ranks of one node are adjacent.

        Raises:
            DeviceError: The group spans several nodes, and no network is known.
        """
        size = len(ranks)
        if size < 2:
            return 0
        in_nodes = Counter(rank // self.node_size for rank in ranks)
        bandwidth: float = self.inside.bandwidth_bytes_per_s
        crossings, hop_ns = len(in_nodes) - 1, 0
        if crossings:
            if self.between is None:
                raise DeviceError(
                    f"ranks {min(ranks)} to {max(ranks)} lie on {len(in_nodes)} nodes of {self.node_size} devices, and no network "
                    "is known for this device: name one (`network`), or a larger node."
                )
            width = min(in_nodes.values())
            across = width * self.between.bandwidth_bytes_per_s
            bandwidth = across if width == 1 else min(across, bandwidth)
            hop_ns = self.between.hop_ns
        passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        latency_ns = passes * (crossings * hop_ns + (size - 1 - crossings) * self.inside.hop_ns)
        moved_bytes = passes * nbytes * (size - 1) / size
        return START_NS + latency_ns + round(moved_bytes * 1e9 / (bandwidth * EFFICIENCY))


def link_names() -> tuple[str, ...]:
    """Names in the table, in its order."""
    return tuple(_table())


def load_link(name: str) -> Link:
    """The link of that name.

    Raises:
        DeviceError: There is no such link; the message names the closest one.
    """
    table = _table()
    if name not in table:
        raise DeviceError(f"{name!r}: no such link. There are {', '.join(table)}.{did_you_mean(name, table)}")
    entry = table[name]
    figures = int(entry["bandwidth_bytes_per_s"]), int(entry["hop_ns"]), tuple(entry["sources"])
    return Link(name, str(entry["kind"]), *figures)


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    table: Mapping[str, Mapping[str, Any]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table
