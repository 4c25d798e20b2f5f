"""`compile-remat devices`: prints the device table with its sources."""

import argparse

from compile_remat._util.text_table import print_table
from compile_remat._util.units import GIB, MIB

_HEADS = ("device", "memory GiB", "GB/s", "host GB/s", "L2 MiB", "node link", "network", "dense TFLOP/s")
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
            ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.flops_per_s),
        )
        for device in devices
    ]
    print_table("", _HEADS, rows, align="lrrrrlll")
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


def _in_units(count: int | None, unit: int, digits: int) -> str:
    return "-" if count is None else f"{count / unit:.{digits}f}"
