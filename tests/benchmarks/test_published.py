"""The published record: what is rebuilt, and when a row counts against us."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import published
from benchmarks.literature import layer_plans, pictures, random_graphs, tables
from benchmarks.literature.layer_plans import ROOM_BYTES, batch_rows, chain_rows, figure_rows
from benchmarks.literature.planned import Network, Planned, Point
from benchmarks.literature.rows import BatchRow, FrontierRow, PointRow, Store, row_of
from benchmarks.literature.sources import SOURCES
from benchmarks.literature.traced import (
    CLAIMS,
    GIB,
    MONET,
    Claim,
    Record,
    claim_rows,
    eager_peak_bytes,
    record_rows,
)
from benchmarks.models import hiremate
from benchmarks.models import published as networks
from benchmarks.models.layer_graphs import LAYER_GRAPHS, Layer, training
from benchmarks.models.layered import DRAWINGS, Drawing, Nodes, cut_at, layered, peak_of
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.target_step import Target, step_of
from compile_remat.passes import Planner

KIB = 1 << 10
POINT = PointRow(
    "monet", "net", "5 GiB", "p100", 10 * GIB, 5 * GIB, 0.1, 10 * GIB, 9 * GIB, 3 * GIB, 0.05, 0.04, 4 * GIB
)
BATCH = BatchRow("checkmate", "net", 100, 90, 120, 40, "why")
SMALL = Drawing(30, 60, 0.3)
BUILDERS = {
    "gpt2": hiremate.gpt2,
    "regnet32": hiremate.regnet32,
    "resnet101": networks.resnet101,
    "uno": hiremate.uno,
    "ufno": hiremate.ufno,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.sum()


def build() -> networks.Built:
    return Net(), (torch.zeros(1024, 64),)


# -- networks that are traced -------------------------------------------------------------------------------------------


def test_the_eager_peak_is_what_a_second_step_holds() -> None:
    """Six weights with gradients, the input, and per layer a product and a GELU, but for the last GELU, which nothing reads again;
    at the backward's start its gradient, a scalar expanded, is written out beside the last product."""
    weights, tensor = 6 * 16 * KIB, 256 * KIB
    held = 2 * weights + tensor + 11 * tensor
    assert held <= eager_peak_bytes(build) <= held + 2 * tensor


@pytest.mark.parametrize("name", list(MONET))
def test_points_are_given_from_the_highest_peak_to_the_lowest(name: str) -> None:
    peaks = [peak for peak, _ in MONET[name].points]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] < MONET[name].baseline_gib
    times = [time for _, time in MONET[name].points]
    assert times == sorted(times)


def test_rows_of_a_network() -> None:
    points = ((4.5 / KIB, 0.05), (1.0 / KIB, 0.3))  # 4.5 MiB and less than the parameters take
    record = Record(build, 5 / KIB, points, ((2 / KIB, "why"),))
    high, low, frontier = record_rows("monet", "net", record)
    assert isinstance(high, PointRow) and isinstance(low, PointRow) and isinstance(frontier, FrontierRow)
    assert high.eager_bytes is not None and high.floor_bytes < high.fastest_bytes < high.eager_bytes
    assert high.extra is not None and high.bound is not None and 0 <= high.bound <= high.extra and high.verdict == ""
    assert high.bytes_at_its_time is not None and high.floor_bytes <= high.bytes_at_its_time <= high.fastest_bytes
    assert low.extra is None and low.bound is None and "no plan of ours fits" in low.verdict
    assert (high.remark, low.remark) == ("", "why")
    assert frontier.points == sorted(frontier.points) and frontier.published == [
        [4.5 * KIB * KIB, 0.05],
        [KIB * KIB, 0.3],
    ]


def test_claims_are_of_activations() -> None:
    """A third of what eager mode holds beside parameters, gradients and input."""
    claim = Claim("rockmate", "v100", {"net": build}, ((1 / 3, 0.2),), {"net": "remark"})
    (row,) = claim_rows(claim, "net")
    assert isinstance(row, PointRow) and row.eager_bytes is not None
    weights, tensor = 6 * 16 * KIB, 256 * KIB
    assert 11 * tensor <= row.baseline_bytes <= 13 * tensor and row.eager_bytes == row.baseline_bytes
    assert row.published_bytes == round(row.baseline_bytes / 3) and row.remark == "remark"
    problem = step_of(Builder(build, dtype="fp32"), Target("v100")).problem
    assert row.fastest_bytes == Planner(problem).fastest().peak_bytes - weights


@pytest.mark.parametrize("name", list(BUILDERS))
def test_networks_of_hiremate_have_their_sizes(name: str) -> None:
    """Numbers in parameters: complex ones count once.  GPT-2 has twice the places; the others are torchvision's."""
    with torch.device("meta"):
        module, inputs = BUILDERS[name]()
    known = {"gpt2": 124_439_808 + 1024 * 768, "regnet32": 107_811_560, "resnet101": 44_549_160}
    if name in known:
        assert sum(p.numel() for p in module.parameters()) == known[name]
    with torch.device("meta"):
        small = BUILDERS[name](1)[1]
    assert small[0].shape[0] == 1 and inputs[0].shape[1:] == small[0].shape[1:]
    assert module(*small).shape == ()


def test_claims_name_networks_that_there_are() -> None:
    for claim in CLAIMS.values():
        assert set(claim.remarks) <= set(claim.networks) and claim.source in SOURCES


@pytest.mark.full
@pytest.mark.parametrize("name", ["ResNet-50", "GoogleNet", "U-Net", "VGG-16"])
def test_a_rebuilt_network_takes_what_the_source_says(name: str) -> None:
    """Eager mode's peaks agree within 6 %: the source's figures have cuDNN's workspaces.  MobileNetV2 differs: see its remark."""
    record = MONET[name]
    assert eager_peak_bytes(record.build) == pytest.approx(record.baseline_gib * GIB, rel=0.06)


# -- layer graphs -------------------------------------------------------------------------------------------------------


def test_a_gradient_reads_what_checkmate_says() -> None:
    """Of layers 0 -> 1 -> 2 with 0 -> 2: outputs of the layer itself and of its readers, and the gradients of these."""
    problem = training([Layer("a", 1, (), 10), Layer("b", 2, (0,), 20), Layer("c", 4, (0, 1), 30)])
    steps = {step.name: (step.reads, tuple(problem.steps[g].name for g in step.gradients)) for step in problem.steps}
    assert steps == {
        "loss": ((2,), ()),
        "d_c": ((2,), ("loss",)),
        "d_b": ((1, 2), ("d_c",)),
        "d_a": ((0, 1, 2), ("d_c", "d_b")),
        "output": ((), ("d_a",)),
    }
    assert problem.step_time_ns == 180 and [step.time_ns for step in problem.steps] == [0, 60, 40, 20, 0]


@pytest.mark.parametrize(
    ("name", "parameters", "operations", "nbytes"),
    [
        ("VGG16", 138_357_544, 15_470_264_320, 3_288_334_336 // 256),
        ("VGG19", 143_667_240, 19_632_062_464, 3_288_334_336 // 256),
        ("MobileNet", 4_253_864, None, 4 * 225 * 225 * 3),
        ("U-Net", None, None, 2_071_986_176 // 32),
    ],
)
def test_layer_graphs_are_keras_models(name: str, parameters: int | None, operations: int | None, nbytes: int) -> None:
    """Parameters of keras.applications with statistics; multiplications of VGG; bytes of the first layer in Checkmate's graphs."""
    graph = LAYER_GRAPHS[name]()
    assert parameters is None or graph.parameter_bytes == 4 * parameters
    assert operations is None or graph.forward_operations == operations
    assert graph.layers[0].nbytes == nbytes


def test_unet_has_the_tensors_of_its_source() -> None:
    """The last classes, and the zeros around the first convolution that goes up."""
    layers = LAYER_GRAPHS["U-Net"]().layers
    assert (len(layers), 32 * layers[14].nbytes, 32 * layers[-1].nbytes) == (35, 73_400_320, 153_780_224)
    assert layers[18].reads == (9, 17) and layers[23].reads == (5, 22) and layers[28].reads == (2, 27)


def test_vgg19_reaches_the_largest_batch_that_there_is() -> None:
    (row,) = batch_rows("VGG19", 289)
    assert isinstance(row, BatchRow) and (row.batch, row.most, row.verdict) == (289, 289, "")
    graph = LAYER_GRAPHS["VGG19"]()
    planner = Planner(graph.problem())
    room = ROOM_BYTES - 2 * graph.parameter_bytes
    assert (
        row.baseline_batch * planner.fastest().peak_bytes
        <= room
        < (row.baseline_batch + 1) * planner.fastest().peak_bytes
    )


def test_rows_of_figure_5() -> None:
    *points, frontier = figure_rows("VGG16")
    assert isinstance(frontier, FrontierRow) and points
    for row in points:
        assert isinstance(row, PointRow) and row.published_extra is None and row.verdict == "" and row.remark
    (square_root,) = frontier.policies["Chen, square root of n"]
    ours = min(extra for nbytes, extra in frontier.points if nbytes <= square_root[0])
    assert ours < square_root[1]
    assert len(frontier.policies["Chen, greedy"]) == 24


def test_the_square_root_rule_on_a_chain() -> None:
    """16 layers, each fourth kept, the others made again group by group: 12 of 48 units of time; the peak is 4 kept layers,
    the three others of a group, two gradients, less the kept ones that are gone."""
    (row,) = chain_rows(16)
    assert isinstance(row, PointRow) and row.published_extra == 12 / 48
    assert row.published_bytes == 9 * layer_plans.UNIT and row.baseline_bytes == 18 * layer_plans.UNIT
    assert row.extra is not None and row.extra <= row.published_extra and row.verdict == ""


# -- random layered graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(DRAWINGS))
def test_drawn_graphs_have_the_published_numbers(name: str) -> None:
    drawing = DRAWINGS[name]
    nodes = layered(drawing, 0)
    assert (len(nodes), sum(len(node.reads) for node in nodes)) == (drawing.nodes, drawing.edges)
    assert [k for k, node in enumerate(nodes) if not node.reads] == [0]
    read = {r for node in nodes for r in node.reads}
    assert set(range(len(nodes))) - read == {len(nodes) - 1}  # all but the last one are read
    assert all(r < k for k, node in enumerate(nodes) for r in node.reads)
    assert nodes == layered(drawing, 0) != layered(drawing, 1)


def test_a_plan_behind_a_cut_is_a_schedule_of_the_whole_order() -> None:
    """The plan's peak is that of the sequence of computations, counted apart from our simulator."""
    nodes = layered(SMALL, 3)
    for cut in (10, 15, 20):
        planner = Planner(cut_at(nodes, cut))
        plans = [planner.fastest(), planner.within(int(0.9 * planner.fastest().peak_bytes)), planner.lowest()]
        assert plans[0].peak_bytes == peak_of(nodes, list(range(len(nodes))))
        assert plans[2].recomputed
        for plan in plans:
            if not plan.again:
                assert peak_of(nodes, schedule_of(plan.recomputed, cut, len(nodes), nodes)) == plan.peak_bytes


def schedule_of(recomputed: tuple[str, ...], cut: int, count: int, nodes: Nodes) -> list[int]:
    """Each node in order; a node that is computed again comes just before the first reader behind the cut."""
    again, schedule = {int(name[1:]) for name in recomputed}, list(range(cut))

    def emit(node: int) -> None:
        for read in nodes[node].reads:
            if read in again:
                again.discard(read)
                emit(read)
        schedule.append(node)

    for node in range(cut, count):
        emit(node)
    return schedule


def test_rows_of_a_random_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAWINGS, "small", SMALL)
    for rows in (random_graphs.order_rows("small", 0), random_graphs.training_rows("small", 0)):
        high, low = rows
        assert isinstance(high, PointRow) and isinstance(low, PointRow)
        assert high.published_bytes == int(0.9 * high.baseline_bytes) and not high.is_comparable
        assert low.extra is None or high.extra is None or high.extra <= low.extra


# -- what they show -----------------------------------------------------------------------------------------------------


def test_a_verdict_counts_what_can_be_compared() -> None:
    assert POINT.verdict == "" and POINT.is_comparable
    slower, faster_kernels = replace(POINT, extra=0.12), replace(POINT, extra=0.12, published_extra=-0.02)
    assert slower.verdict == "2.0% of the step slower" and faster_kernels.verdict == ""
    nothing = replace(POINT, extra=None, bound=None, floor_bytes=6 * GIB)
    assert nothing.verdict == "no plan of ours fits: the lowest takes 20.0% more"
    assert (BATCH.verdict, replace(BATCH, batch=100).verdict) == ("10.0% fewer", "")
    rows = [POINT, slower, replace(faster_kernels, bytes_at_its_time=None), nothing, BATCH]
    assert tables.misses(rows) == [slower, nothing, BATCH]
    assert tables.misses([replace(slower, source="pofo")]) == []  # a range over networks
    line = tables.summary([replace(slower, source="pofo"), replace(POINT, source="pofo")]).splitlines()[0]
    assert line == "points at which ours is inside the reported range: 1 of 2"


def test_tables_and_summary() -> None:
    (batches, points) = tables.tables([BATCH, POINT])
    assert list(batches[1][0]) == ["net", "100", "90", "120", "40", "0.90", "10.0% fewer; why"]
    cells = ["net", "10.00 GiB", "1.00", "0.90", "0.50", "+10.0%", "+5.0%", "+4.0%", "0.40", "0.30", ""]
    assert list(points[1][0]) == cells
    unknown = replace(POINT, published_extra=None, extra=None, bound=None, bytes_at_its_time=None)
    assert list(tables.tables([unknown])[0][1][0])[5:9] == ["not found", "-", "-", "-"]
    lines = tables.summary([POINT, replace(POINT, extra=0.12), unknown]).splitlines()
    assert lines[0] == "points that can be compared in time: 2 of 3; ours is worse on 1"
    assert lines[1].endswith("geometric mean 0.80") and "worst 8.0%" in lines[2]
    assert lines[3:] == [f"not rebuilt: {text}" for text in SOURCES["monet"].missing]
    assert tables.summary([BATCH]).startswith("largest batches: 1; ours is smaller on 1 (net 10.0% fewer)")


def test_stored_rows_are_read_again(tmp_path: Path) -> None:
    frontier = FrontierRow("monet", "net", "GiB", [[1.0, 0.1]], [[2.0, 0.2]], {"rule": [[3.0, 0.3]]})
    store = Store(tmp_path / "rows.json", {})
    store.put(iter([POINT, BATCH, frontier]))
    again = Store(tmp_path / "rows.json", {})
    assert again.rows == [POINT, BATCH, frontier] and again.has("monet", "net") and not again.has("monet", "other")
    assert row_of(asdict(BATCH)) == BATCH


def test_a_frontier_has_plans_that_none_beats() -> None:
    layers = [Layer(f"l{k}", 100, (k - 1,) if k else (), 100) for k in range(12)]
    planned = Planned(Network("chen", "net", "", 1000, fixed_bytes=50), training(layers))
    row = planned.frontier_row([Point("at", 700, 0.2), Point("none", 600, None)])
    peaks, extras = zip(*row.points, strict=True)
    assert list(peaks) == sorted(peaks) and list(extras) == sorted(extras, reverse=True)
    assert peaks[-1] == planned.fastest.peak_bytes + 50 and row.published == [[700.0, 0.2]]


def test_pictures_of_the_rows_that_are_there(tmp_path: Path) -> None:
    source, network, _, _ = pictures.DRAWN["published_resnet50"]
    row = FrontierRow(
        source, network, "GiB", [[GIB, 0.1], [2.0 * GIB, 0.0]], [[1.5 * GIB, 0.2]], {"rule": [[GIB, 5.0]]}
    )
    written = pictures.draw([row, POINT], tmp_path / "images")
    assert [path.name for path in written] == ["published_resnet50.png", "published_resnet50.svg"]
    axes = pictures.picture(row, "title", "theirs").axes[0]
    assert [line.get_label() for line in axes.lines] == ["ours", "theirs", "rule"]
    assert np.allclose(axes.lines[1].get_xydata(), [[1.5, 20.0]]) and axes.get_ylim()[1] < 100


def test_the_command_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    assert published.main(["--toy", "--source", "chen", "--json", str(path)]) == 0
    first = json.loads(path.read_text())["rows"]
    assert len(first) == 1 and "the square root of n" in capsys.readouterr().out
    monkeypatch.setattr(
        published, "jobs", lambda seed: {("chen", "16 equal layers"): lambda: pytest.fail("planned again")}
    )
    assert published.main(["--toy", "--source", "chen", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["rows"] == first
    assert published.main(["--show", str(path)]) == 0 and "16 equal layers" in capsys.readouterr().out


def test_every_job_is_of_a_source_and_pictures_are_of_jobs() -> None:
    known = published.jobs(0)
    assert {source for source, _ in known} == set(SOURCES)
    assert published.TOY_JOBS <= set(known)
    assert {(source, network) for source, network, _, _ in pictures.DRAWN.values()} <= set(known)
