"""Kernels that Inductor puts off, back in the plan's order: which move, which stay, and what a whole model needs then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config

import compile_remat
from benchmarks.digest import emitted
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.inductor import kernel_order, plan_guard
from compile_remat.inductor.kernel_order import KernelSequence
from compile_remat.inductor.plan_guard import CustomSchedulerPass, PlannedKernels
from compile_remat.passes.graph import rewrite_list
from tests.inductor.scheduler_nodes import Node, Sizes

pytestmark = pytest.mark.usefixtures("own_caches")

KIB = 1024


BYTES = Sizes({f"{kind}{kib}": kib * KIB for kind in "abcdghpqrstuvwxyzGW" for kib in range(10)})
"""Names say how many KiB they have: `a4` has 4."""


def node_of(place: int, reads: str, writes: str, rank: object, *, is_extern: bool = False) -> Node:
    overload = torch.ops.aten.convolution_backward.default if writes.startswith("c") else None
    return Node(place, reads, writes, rank, is_extern=is_extern, overload=overload, scheduler=BYTES)


def sequence_of(*kernels: tuple[str, str, int], returned: tuple[str, ...] = ()) -> KernelSequence:
    nodes = [
        node_of(k, reads, writes, rank, is_extern=writes.isupper()) for k, (reads, writes, rank) in enumerate(kernels)
    ]
    return KernelSequence(nodes, returned, range(100))


def order_after(sequence: KernelSequence) -> str:
    sequence.move_up()
    return " ".join(dep.name for node in sequence.nodes for dep in node.read_writes.writes)


def test_a_kernel_that_was_put_off_moves_to_its_place_in_the_plan() -> None:
    """`g4` frees 8 KiB of what the backward had saved; the segment before it needs 8 itself.  Any kernel may be its reader."""
    sequence = sequence_of(("p1", "x8", 0), ("s8", "r8", 2), ("r8", "q8", 3), ("x8 t4", "g4", 1), ("g4 q8", "c1", 4))
    assert order_after(sequence) == "x8 g4 r8 q8 c1"
    copied = sequence_of(("p1", "x8", 0), ("s8", "r8", 2), ("x8 t4", "g4", 1), ("g4", "h4", 4), ("h4 r8", "c1", 4))
    assert order_after(copied) == "x8 g4 r8 h4 c1"
    other = sequence_of(("p1", "x8", 0), ("s8", "r8", 2), ("r8", "q8", 3), ("x8 t4", "g4", 1), ("g4 q8", "w1", 4))
    assert order_after(other) == "x8 g4 r8 q8 w1"


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("is_computed", [True, False])
def test_a_gradient_that_is_computed_by_the_copy_for_a_convolution_has_its_own_place(
    is_computed: bool, is_named: bool
) -> None:
    """Triton code: Inductor names the convolution as the copy's origin, or nothing; what is computed there tells the place."""
    graph = fx.Graph()
    mask, relu, segment, convolution = (
        graph.call_function(target)
        for target in (
            torch.ops.aten.gt.Scalar,
            torch.ops.aten.threshold_backward.default,
            torch.ops.aten.relu.default,
            torch.ops.aten.convolution_backward.default,
        )
    )
    nodes = [node_of(0, "s8", "r8", segment), node_of(1, "x8", "g4", convolution)]
    nodes.append(node_of(2, "g4 r8", "c1", convolution, is_extern=True))
    nodes[1].node.origins = [mask, relu, convolution] if is_computed else [convolution]
    nodes[1].node.origin_node = convolution if is_named else None
    expected = "g4 r8 c1" if is_computed else "r8 g4 c1"
    assert order_after(KernelSequence(nodes, (), [mask, relu, segment, convolution])) == expected


@pytest.mark.parametrize(
    ("kernels", "returned"),
    [
        ((("s8", "r8", 2), ("x4", "g8", 1), ("g8 r8", "c1", 3)), ()),  # makes more than it frees
        ((("s8", "r8", 1), ("x8", "g4", 2), ("g4 r8", "c1", 3)), ()),  # stands where the plan wants it
        ((("s8", "r8", 2), ("r8 x8", "g4", 1), ("g4", "c1", 3)), ()),  # waits for what it stands behind
        ((("s8", "r8", 2), ("x8", "g4", 1), ("g4 r8 x8", "c1", 3)), ()),  # frees nothing: its input is read later
        ((("t1", "x8", 0), ("s8", "r8", 2), ("x8", "g4", 1), ("g4 r8", "c1", 3)), ("x8",)),  # the same: it is returned
        ((("s8", "r8", 2), ("x8", "G4", 1), ("G4 r8", "c1", 3)), ()),  # an unfused kernel stays where the plan has it
    ],
)
def test_others_stay(kernels: tuple[tuple[str, str, int], ...], returned: tuple[str, ...]) -> None:
    before = " ".join(writes for _, writes, _ in kernels)
    assert order_after(sequence_of(*kernels, returned=returned)) == before


def test_no_move_raises_the_peak() -> None:
    """In the plan's place, `g4` would stand beside `u9`, which is gone where Inductor put it."""
    kernels = (("t1", "u9", 0), ("u9", "v1", 2), ("x5", "g4", 1), ("g4 v1", "c1", 3))
    assert order_after(sequence_of(*kernels)) == "u9 v1 g4 c1"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ((("", "z8"), ("x8 y8", "s4"), ("z8 s4", "W1")), "s4 z8 W1"),
        ((("x9", "z8"), ("p1", "s4"), ("z8 s4", "W1")), "z8 s4 W1"),  # the start's operands would live on
        ((("", "z8"), ("z8 x8", "s4"), ("z8 s4", "W1")), "z8 s4 W1"),  # the elements are computed from the start
    ],
)
def test_the_zeros_of_a_scatter_are_written_behind_what_is_scattered(
    kernels: tuple[tuple[str, str], ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`W` is ATen's kernel, which writes elements of `s4` into `z8`; what is computed of `x8` and `y8` frees both."""
    monkeypatch.setattr(kernel_order, "SCATTERS", (SimpleNamespace,))
    sequence = sequence_of(*((reads, writes, 0) for reads, writes in kernels))
    for node in sequence.nodes:
        if node.is_extern():
            node.get_outputs = lambda: [SimpleNamespace(get_name=lambda: "W1", get_mutations=lambda: ["z8"])]
        else:
            node.node = None
    assert sequence.move_starts_down() == (expected != " ".join(writes for _, writes in kernels))
    assert " ".join(dep.name for node in sequence.nodes for dep in node.read_writes.writes) == expected


@pytest.mark.parametrize("pools", [False, True])
def test_the_gradient_of_a_gather_takes_one_buffer_beside_what_is_scattered(pools: bool) -> None:
    """On several threads, where it is ATen's kernel: the peak of the plan, of the emitted code and of the allocator are one."""

    def gathered(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = torch.gather(x.sin(), 0, i).exp()
        return nn.functional.max_pool2d(y[None], 3, 2, 1).sin() if pools else y

    x, index = torch.randn(64, 256, requires_grad=True), torch.randint(64, (64, 256))
    (expected,) = torch.autograd.grad(gathered(x, index).sum(), x)
    call = torch.compile(gathered, backend=remat, options={"memory_budget": "min"})
    assert "aten.scatter_reduce_" in "".join(emitted(gathered, (x, index), "min"))
    compile_remat.reset_reports()

    def step() -> None:  # holds its output to the end, as plans count it
        y = call(x, index)
        y.sum().backward()

    for _ in range(2):
        x.grad = None
        measured = peak_bytes(step, "cpu").peak_bytes
        torch.testing.assert_close(x.grad, expected)
    (report,) = compile_remat.reports()
    assert report.predicted_peak_bytes == report.scheduled_peak_bytes
    assert abs(measured - report.predicted_peak_bytes) <= 64


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *[Layer(32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def scheduled_bytes() -> int:
    torch.compiler.reset()
    compile_remat.reset_reports()
    torch.manual_seed(0)
    call, x = torch.compile(Norms(), backend=remat, options={"memory_budget": "min"}), torch.randn(8, 3, 32, 32)
    for _ in range(2):
        measured = peak_bytes(lambda: call(x).backward(), "cpu").peak_bytes
    (report,) = compile_remat.reports()
    assert report.scheduled_peak_bytes is not None and abs(report.scheduled_peak_bytes - measured) <= measured // 50
    return report.scheduled_peak_bytes


class UsersPass(CustomSchedulerPass):
    """Leaves the order alone, and counts the graphs that it is shown."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        self.num_graphs += 1
        return nodes

    def uuid(self) -> str:
        return "a pass of the user"


@pytest.mark.usefixtures("empty_kernels")
def test_a_segment_that_is_recomputed_does_not_stand_beside_what_a_gradient_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A convolution's backward stays one operator here: a gradient with two readers is written to memory at its place.
    others = tuple(r for r in rewrite_list.REWRITES if r.name != "split_convolution_gradients")
    monkeypatch.setattr(rewrite_list, "REWRITES", others)
    ours, users = scheduled_bytes(), UsersPass()
    with config.patch(_pre_fusion_custom_pass=users):
        assert scheduled_bytes() == ours  # the user's pass runs as well, and does not switch the order off
    assert users.num_graphs == 2
    with config.patch(_pre_fusion_custom_pass=users.__call__):  # torch keeps no graph under a plain function
        assert scheduled_bytes() == ours
    assert users.num_graphs >= 4
    monkeypatch.setattr(plan_guard, "move_kernels", lambda nodes: nodes)
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        assert ours * 1.15 < scheduled_bytes()  # of the lowest plan that is found in Inductor's own order


def test_what_calls_of_a_region_give_is_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls, and behind them the copies into what they are joined to: each goes behind its call."""
    for name in ("InvokeSubgraph", "NonOwningLayout"):
        monkeypatch.setattr(kernel_order, name, type(name, (), {}))

    def made(name: str, node: object, *reads: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            node=node,
            unmet_dependencies=[SimpleNamespace(name=read) for read in reads],
            get_buffer_names=lambda: [name],
            is_extern=lambda: isinstance(node, kernel_order.InvokeSubgraph),
        )

    def copy() -> SimpleNamespace:
        return SimpleNamespace(layout=kernel_order.NonOwningLayout())

    region = kernel_order.InvokeSubgraph
    nodes = [made("a", region()), made("b", region()), made("other", SimpleNamespace(layout=None), "b")]
    nodes += [made("copy of a", copy(), "a"), made("copy of b", copy(), "b")]
    names = [node.name for node in kernel_order.join_at_once(nodes)]
    assert names == ["a", "copy of a", "b", "copy of b", "other"]
    assert kernel_order.join_at_once(nodes[2:]) == nodes[2:], "without a region nothing moves"


def test_the_users_pass_sees_the_kernels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(nodes=[], numbered=[])
    scheduler.compute_ancestors = lambda: scheduler.numbered.append(list(scheduler.nodes))
    nodes = [SimpleNamespace(name=name, scheduler=scheduler) for name in "abc"]
    seen: list[str] = []

    def note(moved: list[Any]) -> list[Any]:
        seen.append("".join(node.name for node in moved))
        return moved

    monkeypatch.setattr(plan_guard, "move_kernels", note)
    monkeypatch.setattr(plan_guard, "replace_backends", lambda own: seen.append("apart"))
    monkeypatch.setattr(plan_guard, "drop_waiting_from_users", lambda given: None)
    assert PlannedKernels()(list(nodes)) == nodes
    assert (seen, scheduler.numbered) == (["apart", "abc"], [])
    turned = PlannedKernels(lambda given: given[::-1])(list(nodes))
    assert turned == nodes[::-1]
    assert seen[2:] == ["apart", "cba"]
    assert scheduler.numbered == [turned]  # the guard reads the nodes' numbers
    assert PlannedKernels()([]) == []


def test_the_cache_of_graphs_knows_both_passes() -> None:
    assert PlannedKernels(UsersPass()).uuid() == ("compile_remat: kernels moved up", "a pass of the user")
    assert isinstance(PlannedKernels.behind(None), PlannedKernels)
    nameless = PlannedKernels.behind(lambda nodes: nodes)
    assert not isinstance(nameless, CustomSchedulerPass)  # torch stores nothing then, as without us
