"""The way to host memory under the settings `offload` and `host_memory`."""

from __future__ import annotations

import pytest

from compile_remat._util.host import host_free_bytes
from compile_remat.budget import MemoryBudget
from compile_remat.config import RematConfig
from compile_remat.cost_models import load_device
from compile_remat.errors import ConfigError
from compile_remat.planning import settings
from compile_remat.planning.settings import link_of, settings_for
from compile_remat.ranks.agreement import Agreement
from compile_remat.ranks.places import Place

GIB = 1 << 30


def test_off_has_no_link() -> None:
    assert link_of(RematConfig(), load_device("h100-sxm")) is None


def test_ranks_are_asked_for_host_memory_where_something_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question waits for all ranks: whoever moves nothing asks none."""
    agreement, asked = Agreement(None, Place("f #1.0", is_first=True), "g", 0), list[bool]()
    monkeypatch.setattr(Agreement, "smallest_host", lambda self: asked.append(True) or GIB)
    assert settings_for(RematConfig(memory_budget=MemoryBudget("min")), [], agreement).link is None and not asked
    config = RematConfig(memory_budget=MemoryBudget("min"), offload="auto", host_memory="2GiB", device="h100-sxm")
    link = settings_for(config, [], agreement).link
    assert link is not None and link.host_bytes == GIB and asked


@pytest.mark.parametrize(("own", "other", "told"), [("2GiB", 0, 2 * GIB), ("512KiB", 2 * GIB, 0)])
def test_nothing_leaves_where_a_rank_has_no_memory_for_it(
    own: str, other: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tell the others, and both warn: plans with copies on some ranks alone would differ."""
    agreement, offered = Agreement(None, Place("f #1.0", is_first=True), "g", 0), list[int]()
    monkeypatch.setattr(Agreement, "offer_host", lambda self, nbytes: offered.append(nbytes))
    monkeypatch.setattr(Agreement, "smallest_host", lambda self: min(*offered, other))
    config = RematConfig(memory_budget=MemoryBudget("min"), offload="auto", host_memory=own, device="h100-sxm")
    with pytest.warns(UserWarning, match="offload = auto moves nothing"):
        assert settings_for(config, [], agreement).link is None
    assert offered == [told]


def test_the_devices_bandwidth_and_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device, free_bytes = load_device("h100-sxm"), host_free_bytes()
    assert free_bytes is not None and free_bytes > GIB
    link = link_of(RematConfig(offload="auto", host_memory="1GiB"), device)
    assert link is not None
    assert (link.out_bytes_per_s, link.back_bytes_per_s) == device.host_rates
    assert link.host_bytes == GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = link_of(RematConfig(offload="auto", host_memory="50%"), device)
    assert shared is not None and 0.7 < shared.host_bytes / (free_bytes / 8) < 1.1  # others run here too


def test_a_percentage_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory differs from process to process, and plans in torch's caches are found by it."""
    found = set()
    for free_bytes in range(100 * GIB, 112 * GIB, GIB // 3):
        monkeypatch.setattr(settings, "host_free_bytes", lambda free_bytes=free_bytes: free_bytes)
        link = link_of(RematConfig(offload="auto", host_memory="25%"), load_device("h100-sxm"))
        assert link is not None
        found.add(link.host_bytes)
    assert found == {24 * GIB}


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"host_memory = 900TiB: the host has .* free"):
        link_of(RematConfig(offload="auto", host_memory="900TiB"), load_device("h100-sxm"))


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({"gradients": "early"}, "h100-sxm", "gradients = early"),
        ({"slices": 2}, "h100-sxm", "slices"),
        ({"mode": "reduce-overhead"}, "h100-sxm", "CUDA graphs"),
        ({"host_memory": "512KiB"}, "h100-sxm", "host_memory = 512KiB is 512.0 KiB, and tensors below 1.0 MiB stay"),
        ({}, "cpu", "the bandwidth between cpu and the host is not known"),
    ],
)
def test_a_warning_says_why_nothing_moves(options: dict[str, object], device: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"offload = auto moves nothing: .*{reason}"):
        assert link_of(RematConfig(offload="auto", **options), load_device(device)) is None  # type: ignore[arg-type]
