"""The profile model: which operators are timed, under which names, what the times price, and the file. No clock is asked."""

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from compile_remat._torch.operators import Like
from compile_remat.cost_models import CostModel, Op, OpKind, Profile, Roofline, Times, describe, load_device
from compile_remat.cost_models.profile_file import ProfileFile
from compile_remat.cost_models.registry import cost_model_names, make_cost_model
from compile_remat.cost_models.timing.replay import CannotTime, Recipe, recipe_of, time_ns

aten = torch.ops.aten
CPU = torch.device("cpu")
BASE = Roofline(load_device("cpu"))


def a_node(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call on fake tensors: real ones among the arguments become its inputs."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:

        def handed(value: Any) -> Any:
            if isinstance(value, list):
                return [handed(v) for v in value]
            if not isinstance(value, torch.Tensor):
                return value
            node = graph.placeholder("x")
            node.meta["val"] = mode.from_tensor(value)
            return node

        nodes = [handed(a) for a in args]
        values = fx.map_arg(nodes, lambda n: n.meta["val"])
        node = graph.call_function(target, tuple(nodes), kwargs)
        node.meta["val"] = target(*values, **kwargs)
    return node


def recipe(*args: Any, **kwargs: Any) -> Recipe:
    found = recipe_of(a_node(*args, **kwargs))
    assert found is not None
    return found


def a_clock(found: list[Any]) -> Callable[[Callable[[], object], torch.device], int]:
    """A clock that runs the operator once, keeps its result, and returns 42."""

    def clock(run: Callable[[], object], device: torch.device) -> int:
        found.append(run())
        return 42

    return clock


def test_equal_work_has_one_signature() -> None:
    a, b = torch.empty(4, 8), torch.empty(8, 16)
    mm = recipe(aten.mm.default, a, b)
    assert mm.signature == "aten.mm.default((float32[4, 8](8, 1)cpu, float32[8, 16](16, 1)cpu)())"
    assert mm == recipe(aten.mm.default, a.clone(), b.clone())
    assert mm.nbytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    others = [
        recipe(aten.mm.default, a, torch.empty(16, 8).t()),
        recipe(aten.mm.default, a, torch.empty(8, 32)),
        recipe(aten.mm.default, a.double(), b.double()),
        recipe(aten.addmm.default, torch.empty(16), a, b),
        recipe(aten.addmm.default, torch.empty(16), a, b, beta=2),
    ]
    assert len({mm.signature, *(o.signature for o in others)}) == 6


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.sin.default, (torch.empty(4),)),  # fuses
        (aten.sum.default, (torch.empty(4),)),  # fuses
        (aten.t.default, (torch.empty(4, 4),)),  # runs nothing
        (aten.rand_like.default, (torch.empty(4),)),  # draws
        (aten.bernoulli.p, (torch.empty(4), 0.5)),  # draws
        (aten.embedding_dense_backward.default, (torch.empty(4, 2), torch.zeros(4, dtype=torch.int64), 9, -1, False)),
    ],
)
def test_what_is_not_timed(target: Any, args: tuple[Any, ...]) -> None:
    assert recipe_of(a_node(target, *args)) is None


def test_what_writes_or_waits_is_not_timed() -> None:
    node = a_node(aten.sort.default, torch.empty(4))
    assert recipe_of(node) is not None
    node.target = aten.index_put_.default
    assert recipe_of(node) is None
    node.target = torch.ops._c10d_functional.wait_tensor.default
    assert recipe_of(node) is None
    node.target = len
    assert recipe_of(node) is None
    assert recipe_of(node.all_input_nodes[0]) is None


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mm.default, (torch.empty(4, 8), torch.empty(16, 8).t())),
        (aten.bmm.default, (torch.empty(1, 4, 8).expand(3, 4, 8), torch.empty(3, 8, 2, dtype=torch.float32))),
        (aten.mm.default, (torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8, 2, dtype=torch.bfloat16))),
        (aten.sort.default, (torch.empty(6, 4),)),
        (
            aten.convolution.default,
            (torch.empty(2, 4, 8, 8), torch.empty(4, 4, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (torch.empty(2, 2, 8, 4), torch.empty(2, 2, 8, 4), torch.empty(2, 2, 8, 4), 0.0, True),
        ),
    ],
)
def test_the_operator_runs_on_tensors_of_its_sizes(target: Any, args: tuple[Any, ...]) -> None:
    node = a_node(target, *args)
    found: list[Any] = []
    made = recipe_of(node)
    assert made is not None
    state = torch.get_rng_state()
    assert time_ns(made, CPU, None, a_clock(found)) == 42
    assert torch.equal(torch.get_rng_state(), state)  # the user's numbers stay
    expected = node.meta["val"]
    pairs = [(found[0], expected)] if isinstance(expected, torch.Tensor) else zip(found[0], expected, strict=True)
    for real, fake in pairs:
        if isinstance(fake, torch.Tensor):
            assert (real.shape, real.dtype) == (fake.shape, fake.dtype) and not real.requires_grad
            assert not fake.dtype.is_floating_point or real.isfinite().all()


def test_the_real_clock_counts_something() -> None:
    assert time_ns(recipe(aten.mm.default, torch.empty(4, 4), torch.empty(4, 4)), CPU, None) >= 1


def test_what_does_not_fit_or_run_is_not_timed() -> None:
    mm = recipe(aten.mm.default, torch.empty(64, 64), torch.empty(64, 64))
    found: list[Any] = []
    with pytest.raises(CannotTime, match="49,152 bytes, and 50,000 are free"):
        time_ns(mm, CPU, 50_000, a_clock(found))
    assert not found
    broken = Recipe("mm", aten.mm.default, (mm.args[0],), (), 1)
    with pytest.raises(CannotTime, match="RuntimeError"):
        time_ns(broken, CPU, None, a_clock(found))


def test_memory_behind_a_tensor() -> None:
    assert Like((3, 4), (0, 1), torch.float32, "cpu").nbytes == 16  # rows repeated
    assert Like((3, 4), (8, 1), torch.float32, "cpu").nbytes == 80  # a slice
    assert Like((0, 4), (4, 1), torch.float32, "cpu").nbytes == 0


def test_measured_where_known_and_the_roofline_elsewhere() -> None:
    mm, other = (a_node(aten.mm.default, torch.empty(n, 8), torch.empty(8, 8)) for n in (4, 5))
    mm.name, other.name = "mm", "other"
    made = recipe_of(mm)
    assert made is not None
    times = Times.of({made.signature: 123_456_789})
    measured = times.of_nodes([mm, other, *mm.all_input_nodes])
    assert measured == (("mm", 123_456_789),)
    model: CostModel = make_cost_model("profile", load_device("cpu"), (), measured)
    base = make_cost_model("roofline", load_device("cpu"), ())
    assert isinstance(model, Profile) and "profile" in cost_model_names()
    assert model.op_time_ns(describe(mm)) == 123_456_789
    assert model.op_time_ns(describe(other)) == base.op_time_ns(describe(other))
    sine = Op("sine", "aten.sin.default", OpKind.POINTWISE, "float32", 100, 400, 400, False, False)
    assert model.arithmetic_time_ns(sine) == base.arithmetic_time_ns(sine)
    assert model.traffic_time_ns(1 << 20) == base.traffic_time_ns(1 << 20)
    assert model.launch_time_ns == base.launch_time_ns


def test_every_figure_is_in_the_keys() -> None:
    one, two = Times.of({"a": 1, "b": 2}), Times.of({"b": 2, "a": 1})
    assert one == two and repr(one) == repr(two) and hash(one) == hash(two)
    assert repr(one) != repr(Times.of({"a": 1, "b": 3})) != repr(Times())
    assert Times().of_nodes([]) == ()
    assert pickle.loads(pickle.dumps(one)) == one


def test_the_file_is_complete_after_every_operator(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "deep" / "here.json", "a device, torch 2.13")
    assert file.times_ns() == {} and file.signatures_of("g") is None
    file.add({"mm": 5})
    ProfileFile(file.path, file.place).add({"bmm": 7})  # another process, meanwhile
    file.add({"mm": 6})
    file.note("g", ["mm", "bmm"])
    assert file.times_ns() == {"mm": 6, "bmm": 7}
    assert file.signatures_of("g") == ("bmm", "mm")
    assert json.loads(file.path.read_text())["place"] == "a device, torch 2.13"
    assert [path.name for path in file.path.parent.iterdir()] == ["here.json"]


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"schema": 1, "times_ns": {"mm": -1}, "graphs": {}}', '{"schema": 0}']
)
def test_a_file_that_cannot_be_read_is_begun_anew(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ProfileFile(tmp_path / "here.json", "here")
    file.path.write_text(text)
    with caplog.at_level(logging.WARNING, "compile_remat"):
        assert file.times_ns() == {}
    assert "cannot be read" in caplog.text
    file.add({"mm": 5})
    assert file.times_ns() == {"mm": 5}
