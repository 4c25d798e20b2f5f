"""Links, and collectives over them."""

from __future__ import annotations

import pytest

from compile_remat.cost_models import CollectiveKind, Link, Links, device_names, link_names, load_device, load_link
from compile_remat.cost_models.device.links import EFFICIENCY, START_NS
from compile_remat.errors import DeviceError

INSIDE = Link("inside", "NVLink", 100_000_000_000, 1_000, ())
BETWEEN = Link("between", "InfiniBand", 10_000_000_000, 5_000, ())
CLUSTER = Links(INSIDE, BETWEEN, node_size=4)
GATHER, REDUCE = CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE


def transfer_ns(nbytes: float, bandwidth: float) -> int:
    return round(nbytes * 1e9 / (bandwidth * EFFICIENCY))


def test_every_link_names_its_sources_and_every_device_its_links() -> None:
    for name in link_names():
        link = load_link(name)
        assert link.bandwidth_bytes_per_s > 10**9 and link.hop_ns > 0
        assert link.kind in ("NVLink", "PCIe", "InfiniBand")
        assert any(s.startswith("bandwidth: ") for s in link.sources) and any(
            s.startswith("hop: ") for s in link.sources
        )
    named = [load_device(name) for name in device_names()]
    assert {load_link(d.node_link).kind for d in named if d.node_link} == {"NVLink", "PCIe"}
    assert {load_link(d.network_link).kind for d in named if d.network_link} == {"InfiniBand"}
    for device in named:  # the same figure stands in two places
        if device.node_link and device.node_link.startswith("pcie"):
            assert load_link(device.node_link).bandwidth_bytes_per_s == device.host_bandwidth_bytes_per_s


def test_a_ring_inside_a_node() -> None:
    assert CLUSTER.time_ns(GATHER, 4_000_000, range(4)) == START_NS + 3 * 1_000 + transfer_ns(3_000_000, 1e11)
    assert CLUSTER.time_ns(REDUCE, 4_000_000, range(4)) == START_NS + 6 * 1_000 + transfer_ns(6_000_000, 1e11)


def test_a_ring_over_nodes_is_as_wide_as_its_adapters() -> None:
    one_each, two_each = (0, 4, 8, 12), (0, 1, 4, 5)
    assert CLUSTER.time_ns(GATHER, 4_000_000, one_each) == START_NS + 3 * 5_000 + transfer_ns(3_000_000, 1e10)
    assert CLUSTER.time_ns(GATHER, 4_000_000, two_each) == START_NS + 2 * 1_000 + 5_000 + transfer_ns(3_000_000, 2e10)


def test_one_rank_needs_no_time_and_an_unknown_network_is_said() -> None:
    assert CLUSTER.time_ns(REDUCE, 10**9, (3,)) == 0
    with pytest.raises(DeviceError, match="no network is known"):
        Links(INSIDE, None, 4).time_ns(GATHER, 1, range(8))
    with pytest.raises(DeviceError, match='Did you mean "nvlink-4"'):
        load_link("nvlink4")
