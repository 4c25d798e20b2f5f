"""`compile-remat devices`: the device table with its sources."""

import argparse

from compile_remat._util.text_table import print_table
from compile_remat._util.units import GIB, MIB

_HEADS = ("device", "memory GiB", "GB/s", "host GB/s", "L2 MiB", "dense TFLOP/s")


def run_devices(arguments: argparse.Namespace) -> int:
    """Print the device table: figures, then the sources of each."""
    from compile_remat.cost_models import device_names, load_device

    devices = [load_device(name) for name in device_names()]
    rows = [
        (
            device.name,
            _in_units(device.memory_bytes, GIB, 1),
            _in_units(device.bandwidth_bytes_per_s, 10**9, 0),
            _in_units(device.host_bandwidth_bytes_per_s, 10**9, 0),
            _in_units(device.l2_bytes, MIB, 0),
            ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in device.flops_per_s),
        )
        for device in devices
    ]
    print_table("", _HEADS, rows, align="lrrrrl")
    print("\nsources")
    for device in devices:
        print(f"{device.name}:", *(f"  {source}" for source in device.sources), sep="\n")
    return 0


def _in_units(count: int | None, unit: int, digits: int) -> str:
    return "-" if count is None else f"{count / unit:.{digits}f}"
