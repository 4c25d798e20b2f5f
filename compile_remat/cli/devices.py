"""`compile-remat devices`: prints the device table with its sources."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_remat._util.text_table import print_table
from compile_remat._util.units import GIB, MIB

if TYPE_CHECKING:
    from compile_remat.cost_models import Device

_HEADS = ("device", "memory GiB", "GB/s", "host GB/s", "L2 MiB", "node link", "network")
_LINK_HEADS = ("link", "kind", "GB/s a direction", "us a hop")


def run_devices(arguments: argparse.Namespace) -> int:
    """Print the device table and the links between devices: first the figures, then the sources of each."""
    from compile_remat.cost_models import device_names, link_names, load_device, load_link

    devices = [load_device(name) for name in device_names()]
    rows = [
        (
            device.name,
            _in_units(device.memory_bytes, GIB, 1),
            _in_units(device.bandwidth_bytes_per_s, 10**9, 0),
            _in_units(device.host_bandwidth_bytes_per_s, 10**9, 0),
            _in_units(device.l2_bytes, MIB, 0),
            device.node_link or "-",
            device.network_link or "-",
        )
        for device in devices
    ]
    print_table("", _HEADS, rows, align="lrrrrll")
    print()
    _print_rates(devices)
    links = [load_link(name) for name in link_names()]
    print()
    figures = [(f"{link.bandwidth_bytes_per_s / 10**9:g}", f"{link.hop_ns / 1000:g}") for link in links]
    print_table(
        "", _LINK_HEADS, [(link.name, link.kind, *own) for link, own in zip(links, figures, strict=True)], align="llrr"
    )
    print("\nsources")
    named = [(device.name, device.sources) for device in devices] + [(link.name, link.sources) for link in links]
    for name, sources in named:
        print(f"{name}:", *(f"  {source}" for source in sources), sep="\n")
    return 0


def _print_rates(devices: Sequence[Device]) -> None:
    """Print the rates of matrix products for each dtype."""
    rates = {device.name: dict(device.flops_per_s) for device in devices}
    dtypes = sorted({dtype for each in rates.values() for dtype in each})
    rows = [
        (name, *(f"{each[dtype] / 1e12:g}" if dtype in each else "-" for dtype in dtypes))
        for name, each in rates.items()
    ]
    print_table("", ("dense TFLOP/s", *dtypes), rows)


def _in_units(count: int | None, unit: int, digits: int) -> str:
    return "-" if count is None else f"{count / unit:.{digits}f}"
