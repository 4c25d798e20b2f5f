"""The device table, device files and detection."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_remat.cost_models import detect, device_names, load_device
from compile_remat.cost_models.device import table
from compile_remat.cost_models.device.description import GPU_EFFICIENCY
from compile_remat.cost_models.device.table import _from_properties
from compile_remat.cost_models.operators.kinds import HEAVY_KINDS, OpKind
from compile_remat.cost_models.operators.products import CAUSAL_POSITION
from compile_remat.errors import DeviceError

EXPECTED = (
    "h100-sxm h100-pcie h200 b200 gh200 gb200 a100-40gb a100-80gb l40s l4 a10 v100 p100 t4 "
    "rtx3090 rtx4090 rtx5090 mi250x mi300x cpu"
).split()  # fmt: skip


HARDWARE = (
    ("NVIDIA H100 80GB HBM3", "h100-sxm"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H200", "h200"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA GH200 480GB", "gh200"),
    ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ("NVIDIA A100 80GB PCIe", "a100-80gb"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA L4", "l4"),
    ("NVIDIA A10", "a10"),
    ("Tesla V100-SXM2-32GB", "v100"),
    ("Tesla P100-SXM2-16GB", "p100"),
    ("Tesla T4", "t4"),
    ("NVIDIA GeForce RTX 3090", "rtx3090"),
    ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ("AMD Instinct MI250X", "mi250x"),
    ("AMD Instinct MI300X", "mi300x"),
)
"""Names that drivers print, and the entries that they are."""


def test_names_of_the_table() -> None:
    """The other tests of entries walk the table; this list holds the names that users type."""
    assert list(device_names()) == EXPECTED, (
        "a new device has its name in EXPECTED of tests/cost_models/device/test_table.py"
    )


@pytest.mark.parametrize("name", device_names())
def test_entry_is_sane(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.sources and all(len(source) > 20 for source in device.sources), "a source names its document"
    assert all(rate > 0 for _, rate in device.flops_per_s)
    rates = [(narrow, wide) for wide in ("float32",) for narrow in ("bfloat16", "float16", "tf32")]
    for narrow, wide in [*rates, ("float8", "bfloat16")]:
        assert device.rate(narrow) >= device.rate(wide), f"no hardware computes {narrow} slower than {wide}"
    assert 10**10 <= device.bandwidth_bytes_per_s <= 10**13, (
        "10 GB/s to 10 TB/s, in bytes per second: is the unit right?"
    )
    figures = (device.memory_bytes, device.host_bandwidth_bytes_per_s, device.l2_bytes, device.multiprocessors)
    assert all((figure is None) == (name == "cpu") for figure in figures), (
        "an accelerator has memory_bytes, host_bandwidth_bytes_per_s, l2_bytes and multiprocessors; the generic CPU has none"
    )
    if name != "cpu":
        host = device.host_bandwidth_bytes_per_s or 0
        assert 10 * 10**9 <= host <= 450 * 10**9, (
            "PCIe 3 to NVLink-C2C in one direction, 10 to 450 GB/s; a faster link needs a new limit"
        )
        assert device.host_rates is not None and all(host / 3 < rate < host for rate in device.host_rates)
        l2 = device.l2_bytes or 0
        assert 4 << 20 <= l2 <= 256 << 20, (
            "4 to 256 MiB: the last cache before device memory; a larger one needs a new limit"
        )
        assert any("host link" in source for source in device.sources), 'a source says "host link"'
        assert any("L2" in source for source in device.sources), 'a source says "L2"'
        assert any("sustained clock" in source for source in device.sources), 'a source says "sustained clock"'
        assert 0.7 <= device.sustained_clock_ratio < 1, "no large GPU is known that keeps its clock while it trains"
    fractions = [dict(device.efficiency).get(kind, 1) for kind in (*OpKind, "bandwidth")]
    assert all(0 < fraction <= 1 for fraction in fractions), "kernels reach a fraction of the data sheet's figures"
    assert hash(device) == hash(load_device(name))


def test_an_entry_with_a_mistake_names_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = GOOD | {"node_link": "nvlink-9", "hardware": ["Mine"]}
    monkeypatch.setattr(table, "_table", lambda: {"mine": entry})
    for load in (lambda: load_device("mine"), lambda: _from_properties("Mine", SimpleNamespace(total_memory=1))):
        with pytest.raises(DeviceError, match=r'^the device table, mine: "node_link": '):
            load()


def test_every_accelerator_is_detected_by_a_name_of_its_hardware() -> None:
    without = {*device_names()} - {name for _, name in HARDWARE} - {"cpu"}
    assert without == set(), "a new device has the name that torch.cuda.get_device_name prints in HARDWARE of this file"


def test_rates_are_dense() -> None:
    """Checks two rates that are often quoted with sparsity."""
    assert load_device("h100-sxm").rate("bfloat16") == pytest.approx(989e12, rel=0.01)
    assert load_device("a100-80gb").rate("bfloat16") == 312e12


def test_efficiencies_name_kinds_and_operators() -> None:
    assert {name for name, _ in GPU_EFFICIENCY} <= {*OpKind, "bandwidth", *CAUSAL_POSITION}
    assert set(HEAVY_KINDS) <= {name for name, _ in GPU_EFFICIENCY}


@pytest.mark.parametrize(
    ("asked", "closest"),
    [("h100-smx", "h100-sxm"), ("a100_80gb ", "a100-80gb"), ("rtx4900", "rtx4090"), ("cpus", "cpu")],
)
def test_unknown_name_is_told_the_closest(asked: str, closest: str) -> None:
    with pytest.raises(DeviceError) as caught:
        load_device(asked)
    assert f'device = "{asked}"' in str(caught.value)
    assert f'Did you mean "{closest}"?' in str(caught.value)
    assert "mi300x" in str(caught.value)


def test_name_in_capitals_is_known() -> None:
    assert load_device("H200") == load_device("h200")


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


GOOD = {"bandwidth_bytes_per_s": 2e12, "flops_per_s": {"float32": 5e13}, "sources": ["measured"]}


def test_file_of_the_same_shape_is_accepted(tmp_path: Path) -> None:
    device = load_device(write(tmp_path / "mine.json", GOOD))
    assert (device.name, device.bandwidth_bytes_per_s, device.rate("bfloat16")) == ("mine", 2 * 10**12, 5 * 10**13)
    assert (device.memory_bytes, device.sources) == (None, ("measured",))
    whole = GOOD | {"name": "lab", "memory_bytes": 10**10, "launch_ns": 7, "efficiency": {"matmul": 0.9}}
    lab = load_device(write(tmp_path / "lab.json", whole))
    assert (lab.name, lab.memory_bytes, lab.launch_ns, lab.efficiency) == ("lab", 10**10, 7, (("matmul", 0.9),))


def test_what_an_older_file_does_not_say_is_unknown(tmp_path: Path) -> None:
    device = load_device(write(tmp_path / "old.json", GOOD | {"efficiency": {"matmul": 0.9}}))
    assert (device.host_bandwidth_bytes_per_s, device.l2_bytes, device.multiprocessors) == (None, None, None)
    assert (device.half_sizes, device.launches_ns, device.sustained_clock_ratio) == ((), (), 1.0)


def test_new_figures_are_read(tmp_path: Path) -> None:
    more = {
        "host_bandwidth_bytes_per_s": 1e10,
        "from_host_bytes_per_s": 9e9,
        "host_copy_slowdown": 0,
        "l2_bytes": 1 << 21,
        "l2_bandwidth_bytes_per_s": 9e12,
        "multiprocessors": 4,
        "half_sizes": {"matmul": [1, 2, 3]},
        "launches_ns": {"conv": 5},
        "sustained_clock_ratio": 0.9,
    }
    device = load_device(write(tmp_path / "new.json", GOOD | more))
    assert (device.host_bandwidth_bytes_per_s, device.l2_bytes, device.multiprocessors) == (10**10, 1 << 21, 4)
    assert (device.host_rates, device.host_copy_slowdown) == ((83 * 10**8, 9 * 10**9), 0.0)
    assert (device.l2_bandwidth_bytes_per_s, device.launches_ns) == (9 * 10**12, (("conv", 5),))
    assert (device.half_sizes, device.sustained_clock_ratio) == ((("matmul", (1.0, 2.0, 3.0)),), 0.9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([1], "a device is a JSON object, found list"),
        ({"flops_per_s": {"float32": 1}}, '"bandwidth_bytes_per_s" is missing'),
        (GOOD | {"lunch_ns": 3}, '"lunch_ns" is not a field of a device file. Did you mean "launch_ns"'),
        (GOOD | {"flops_per_s": {"bfloat16": 1}}, 'to hold "float32"'),
        (GOOD | {"flops_per_s": {"float32": 1, "int8": 1}}, 'no type "int8"'),
        (GOOD | {"bandwidth_bytes_per_s": -1}, '"bandwidth_bytes_per_s" has to be a number above 0, found -1'),
        (GOOD | {"memory_bytes": "80GB"}, "\"memory_bytes\" has to be a number above 0, found '80GB'"),
        (GOOD | {"launch_ns": True}, '"launch_ns" has to be a number above 0, found True'),
        (GOOD | {"efficiency": 0.5}, '"efficiency" has to map'),
        (GOOD | {"l2_bytes": "6 MB"}, "\"l2_bytes\" has to be a number above 0, found '6 MB'"),
        (GOOD | {"sustained_clock_ratio": 1.1}, '"sustained_clock_ratio" has to be at most 1, found 1.1'),
        (GOOD | {"half_sizes": 3}, '"half_sizes" has to map'),
        (GOOD | {"half_sizes": {"conv": [1, 2]}}, '"half_sizes" of conv has to be three lengths (m, n, k)'),
        (GOOD | {"half_sizes": {"conv": [1, 2, -3]}}, "has to be 0 or more, found -3"),
        (GOOD | {"launches_ns": {"conv": 0}}, '"launches_ns of conv" has to be a number above 0'),
    ],
)
def test_bad_file_gets_a_clear_error(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DeviceError) as caught:
        load_device(write(tmp_path / "bad.json", content))
    assert message in str(caught.value)
    assert "bad.json" in str(caught.value)


def test_missing_file_gets_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be read: No such file"):
        load_device(str(tmp_path / "none.json"))


def test_cpu_is_detected_as_the_generic_cpu() -> None:
    assert detect(torch.device("cpu")) == load_device("cpu")


@pytest.mark.parametrize(("hardware", "name"), HARDWARE)
def test_known_hardware_takes_the_memory_that_is_there(hardware: str, name: str) -> None:
    device = _from_properties(hardware, SimpleNamespace(total_memory=12345))
    assert device.name == name
    assert device.memory_bytes == 12345
    assert device.flops_per_s == load_device(name).flops_per_s


@pytest.mark.parametrize(
    "hardware",
    [
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA A10G",
        "NVIDIA L40",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_unknown_hardware_gets_careful_figures_and_says_so(hardware: str) -> None:
    properties = SimpleNamespace(
        total_memory=24 * 2**30,
        multi_processor_count=80,
        major=8,
        clock_rate=1_700_000,
        memory_clock_rate=6_250_000,
        memory_bus_width=384,
    )
    device = _from_properties(hardware, properties)
    assert (device.name, device.memory_bytes) == (hardware, 24 * 2**30)
    assert device.rate("float32") == 80 * 128 * 1_700_000_000
    assert device.bandwidth_bytes_per_s == 2 * 48 * 6_250_000_000
    assert "guess" in device.sources[0]


def test_unknown_hardware_without_clocks() -> None:
    device = _from_properties("Some GPU", SimpleNamespace(total_memory=1, multi_processor_count=10))
    assert device.rate("bfloat16") == device.rate("float32") > 0
    assert device.bandwidth_bytes_per_s > 0


def test_other_backends_get_a_guess() -> None:
    device = detect(torch.device("mps"))
    assert (device.name, device.memory_bytes) == ("mps", None)
    assert "a guess" in device.sources[0]
