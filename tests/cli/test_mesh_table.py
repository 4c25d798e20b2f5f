"""`compile-remat plan MODEL --mesh ...` in this process."""

from __future__ import annotations

import json

import pytest

from compile_remat import cli

NET, STACK = "tests.forecast.mesh.models:net", "tests.forecast.mesh.models:stack"
ON = ["--device", "h100-sxm", "--mesh"]


def test_the_table_has_every_figure_and_the_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", NET, *ON, "dp=4", "--shard", "fsdp2"]) == 0
    text = capsys.readouterr()
    words = " ".join(text.out.split())
    for name in (
        "parameters, its part",
        "optimizer state (adamw)",
        "gathered parameters, of it",
        "region peak, all graphs",
        "graphs and gradients, at the step's peak",
        "FSDP2, at the step's peak",
        "the step's peak is at",
    ):
        assert name in words
    assert "(batch 64 a rank; as built), one of 4 x h100-sxm, dp=4,tp=1, fsdp2" in words
    assert "blocks.0 3" in words and "not hidden by kernels" in words and "fits yes" in words
    assert f"tracing {NET}" in text.err


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", STACK, *ON, "dp=4,tp=2", "--shard", "fsdp2", "--keep-gathered", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mesh"], found["shard"], found["num_ranks"]) == ("dp=4,tp=2", "fsdp2", 8)
    assert [graph["calls"] for graph in found["graphs"]] == [1, 2, 1]
    assert found["collective_time_ns"] > found["exposed_time_ns"] > 0
    moment = found["peak_moment"]
    fixed_bytes = found["parameter_bytes"] + found["optimizer_bytes"] + found["input_bytes"]
    assert found["total_bytes"] == fixed_bytes + moment["graph_bytes"] + moment["wrapper_bytes"]


def test_the_table_says_what_a_node_s_host_holds(capsys: pytest.CaptureFixture[str]) -> None:
    to_host = ["--shard", "fsdp2-whole", "--batch", "16384", "--budget", "min", "--offload", "auto"]
    assert cli.main(["plan", STACK, *ON, "dp=2", *to_host]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "on the host" in words and "that of the 2 ranks of a node" in words and "copies prolong the step by" in words


def test_mixed_precision_is_fsdp2_s(capsys: pytest.CaptureFixture[str]) -> None:
    types = ["--param-dtype", "bf16", "--reduce-dtype", "fp32"]
    assert cli.main(["plan", STACK, *ON, "dp=4", "--shard", "fsdp2-whole", *types]) == 0
    assert "(batch 512 a rank; as built, gathered in bf16)" in " ".join(capsys.readouterr().out.split())


def test_the_status_says_that_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", NET, *ON, "dp=2", "--optimizer", "90GiB"]) == 1
    assert "fits" in capsys.readouterr().out


def test_a_device_without_links_has_no_price_for_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", NET, "--device", "cpu", "--mesh", "dp=2"]) == 0
    assert "this device's links are not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([*ON, "dp=2", "--gradients", "early"], "--gradients early does not go with --mesh"),
        ([*ON, "dp=2", "--compare"], "--compare does not go with --mesh"),
        ([*ON, "dp=2", "--html", "x.html"], "--html does not go with --mesh"),
        (["--devices", "t4,l4", "--mesh", "dp=2"], "--devices does not go with --mesh"),
        (["--device", "t4", "--shard", "fsdp2"], "--shard needs --mesh"),
        (["--device", "t4", "--node-size", "4"], "--node-size needs --mesh"),
        (["--device", "t4", "--param-dtype", "bf16"], "--param-dtype needs --mesh"),
        ([*ON, "dp=2", "--param-dtype", "bf16"], "param_dtype is a setting of FSDP2, and shard is 'ddp'"),
        ([*ON, "dp=2", "--shard", "fsdp2", "--reduce-dtype", "bf61"], "reduce_dtype = 'bf61': no such type"),
        ([*ON, ""], "'' is no dimension"),
        ([*ON, "dp=2", "--network", "infiniband-ndx"], "no such link"),
    ],
)
def test_what_makes_no_sense_is_said(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", NET, *given]) == 2
    assert text in capsys.readouterr().err
