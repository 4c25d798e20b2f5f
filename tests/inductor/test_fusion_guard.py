"""The kernels that may be fused: made-up graphs, sizes in bytes."""

from __future__ import annotations

import pytest

from compile_remat.inductor.fusion_guard import DEPTH, SMALL_SHARE, KernelGrouping, PlannedOrder
from compile_remat.inductor.scheduler_graph import Kernel
from tests.inductor.scheduler_nodes import Joined, Node, Sizes


def order(*nodes: Node, returned: str = "", **nbytes: int) -> tuple[PlannedOrder, dict[str, object]]:
    """Everything takes 1000 bytes but what is named; nothing is joined yet."""
    joined: dict[str, object] = {node.name: node for node in nodes}
    return PlannedOrder(Sizes(nbytes, nodes), returned.split()), joined


def keeps(found: tuple[PlannedOrder, dict[str, object]], first: int, second: int) -> bool:
    lines, joined = found
    return lines.keeps_memory(joined, joined[f"op{first}"], joined[f"op{second}"])


def test_siblings_with_a_matmul_between_stay_apart() -> None:
    nodes = [
        Node(0, "primals_1", "a"), Node(1, "a", "m", is_extern=True), Node(2, "primals_1", "b"), Node(3, "b", "n", is_extern=True),
    ]  # fmt: skip
    assert not keeps(order(*nodes, m=1, n=1, returned="m n"), 0, 2)
    assert keeps(order(*nodes, b=1000 // SMALL_SHARE, m=1, n=1, returned="m n"), 0, 2)  # its outputs are small


def test_siblings_may_meet_where_nothing_is_freed_between() -> None:
    free = [Node(0, "primals_1", "a"), Node(1, "primals_1", "b"), Node(2, "a b", "c")]
    assert keeps(order(*free, returned="c"), 0, 1)


def test_the_last_of_one_segment_and_the_first_of_the_next() -> None:
    """Neighbours: the first frees `a` for what the second writes, unless both run at once."""
    nodes = [Node(0, "a primals_1", "s"), Node(1, "primals_1", "b")]
    assert not keeps(order(*nodes, s=4, returned="s b"), 0, 1)
    assert keeps(order(*nodes, s=4, returned="s b a"), 0, 1)  # nothing is freed
    held = [Node(0, "primals_1 primals_2", "s"), Node(1, "primals_1", "b")]
    assert keeps(order(*held, s=4, returned="s b"), 0, 1)  # the caller's


def in_second_pass(*nodes: Node, returned: str, **nbytes: int) -> tuple[PlannedOrder, dict[str, object]]:
    """As `order`, after a first pass that fused nothing."""
    lines, joined = order(*nodes, returned=returned, **nbytes)
    lines.limit_bytes = lines.levels(joined).peak_bytes
    return lines, joined


@pytest.mark.parametrize(("large", "is_allowed"), [(1000, False), (1999, False), (2000, True)])
def test_the_second_pass_lets_memory_rise_up_to_the_peak_of_the_graph(large: int, is_allowed: bool) -> None:
    """s and b beside a take 2004 bytes, apart 1004; a buffer that lived earlier took as much beside a."""
    nodes = [
        Node(0, "primals_2", "a"),
        Node(1, "primals_2", "x"),
        Node(2, "x", "y"),
        Node(3, "a primals_1", "s"),
        Node(4, "primals_1", "b"),
    ]
    nodes[1].extern = nodes[2].extern = True
    sizes = {"x": large // 2, "y": large - large // 2, "s": 4, "b": 996}
    assert not keeps(order(*nodes, returned="s b y", **sizes), 3, 4)
    found = in_second_pass(*nodes, returned="s b", **sizes)
    assert found[0].limit_bytes == 1000 + large
    assert keeps(found, 3, 4) == is_allowed


def test_rises_of_the_second_pass_add_up() -> None:
    """Each of two fusions holds 1000 bytes more beside the product; only one of them fits below the peak of an earlier kernel."""
    nodes = [
        Node(0, "primals_3", "x", is_extern=True),
        Node(1, "x", "y", is_extern=True),
        Node(2, "y", "z", is_extern=True),
        Node(3, "primals_1", "s"),
        Node(4, "primals_2", "t"),
        Node(5, "s t", "product", is_extern=True),
        Node(6, "primals_1", "a"),
        Node(7, "primals_2", "b"),
    ]
    for pair, other in (((3, 6), (4, 7)), ((4, 7), (3, 6))):
        found = in_second_pass(*nodes, returned="product a b", x=2000, y=2000, z=0)
        assert found[0].limit_bytes == 4000
        assert keeps(found, *pair) and keeps(found, *other)
        one = Joined(*(nodes[k] for k in pair))
        found[1].update(dict.fromkeys((f"op{k}" for k in pair), one))
        assert not keeps(found, *other)


GELU_TWICE = ("h", "again"), ("again dy", "weight"), ("dy", "g"), ("h g", "gradient")
"""GELU once more, the gradients of the weight and of GELU's result, and the gradient of its operand: reads and writes."""


@pytest.mark.parametrize(("large", "is_allowed"), [(1699, False), (1700, True)])
def test_in_the_second_pass_a_product_may_wait_for_a_fused_kernel(large: int, is_allowed: bool) -> None:
    """The weight's gradient, which stands between GELU and its gradient, comes after one kernel for both."""
    nodes = [Node(0, "primals_1", "x", is_extern=True), Node(1, "x", "y", is_extern=True)]
    nodes += [Node(k, *names, is_extern=k in (3, 4)) for k, names in enumerate(GELU_TWICE, 2)]
    sizes = {"x": large, "y": 0, "again": 700, "weight": 100}
    assert not keeps(order(*nodes, returned="weight gradient", **sizes), 2, 5)
    found = in_second_pass(*nodes, returned="weight gradient", **sizes)
    assert found[0].limit_bytes == large
    assert keeps(found, 2, 5) == is_allowed
    both = Kernel.of([nodes[2], nodes[5]])
    together = KernelGrouping(*found, both)
    kernels = [found[0].kernel(nodes[k]) for k in (0, 1, 3, 4)]
    assert together.in_order([*kernels, both]) == [*kernels[:2], kernels[3], both, kernels[2]]
    assert together.levels().peak_bytes == max(large, 1700)  # g, then both results, one of them in the place of g


def test_a_product_does_not_wait_where_only_a_later_kernel_takes_as_much() -> None:
    """By then, copies of weights may have died, of which the guard knows nothing."""
    nodes = [Node(k, *names, is_extern=k in (1, 2)) for k, names in enumerate(GELU_TWICE)]
    nodes += [Node(4, "primals_1", "x", is_extern=True), Node(5, "x", "y", is_extern=True)]
    found = in_second_pass(*nodes, returned="weight gradient", x=9000, y=0, again=700, weight=100)
    assert found[0].limit_bytes == 8100  # the inputs have died by then
    assert not keeps(found, 0, 3)


def test_a_kernel_writes_over_what_it_is_the_last_to_read() -> None:
    nodes = [Node(0, "a primals_1", "c"), Node(1, "primals_1", "b")]
    assert keeps(order(*nodes, returned="c b"), 0, 1)
    nodes[0].extern = True
    lines, joined = order(*nodes, returned="c b")
    kernels = [lines.kernel(node) for node in nodes]
    assert KernelGrouping(lines, joined).peak_bytes(kernels) == 1000  # c beside a, then b in the place of a


def test_what_one_kernel_makes_and_reads_itself_takes_nothing() -> None:
    nodes = [Node(0, "primals_1", "a"), Node(1, "a", "b")]
    assert keeps(order(*nodes, returned="b"), 0, 1)
    both = Kernel.of(nodes)
    lines, joined = order(*nodes, returned="b")
    assert KernelGrouping(lines, joined, both).peak_bytes([both]) == 1000
    assert KernelGrouping(lines, joined).peak_bytes([lines.kernel(node) for node in nodes]) == 1000


@pytest.mark.parametrize("second", [{"scatters_into": "e"}, {"sliced": "s"}])
def test_a_wide_value_is_not_written_over_what_inductor_keeps(second: dict[str, str]) -> None:
    """A gradient is computed in float32 from something as large, which dies there, and then rounded: one kernel takes half of two.

    The dying buffer is the result of a scatter, or has twice as many bfloat16 numbers, half of them read: Inductor reuses neither.
    """
    is_scatter = "scatters_into" in second
    nodes = [
        Node(0, "primals_1", "e"),
        Node(1, "e primals_1", "s", is_extern=not is_scatter, scatters_into=second.get("scatters_into", "")),
        Node(2, "s other", "wide", sliced=second.get("sliced", "")),
        Node(3, "wide", "narrow"),
    ]
    assert keeps(order(*nodes, narrow=500, other=700, returned="narrow"), 2, 3)


def test_what_reads_the_first_must_not_wait_for_the_second() -> None:
    nodes = [
        Node(0, "primals_1", "a"),
        Node(1, "a", "m", is_extern=True),
        Node(2, "y", "z"),
        Node(3, "primals_1 z", "b"),
    ]
    assert not keeps(order(*nodes, m=1, returned="m b"), 0, 3)


def test_what_a_waiting_kernel_stood_before_comes_after_all_that_it_waits_for() -> None:
    """Bias gradients of an unrolled cell: the last addition and the first sum as one kernel made weight gradients wait."""
    nodes = [
        Node(0, "primals_1", "g"),
        Node(1, "g", "sum"),
        Node(2, "g primals_2", "weight", is_extern=True),
        Node(3, "primals_3", "h", is_extern=True),
        Node(4, "h primals_4", "late"),
        Node(5, "sum late", "total"),
    ]
    lines, joined = order(*nodes, sum=4, weight=4, late=4, total=4, returned="weight total")
    both = Kernel.of([nodes[1], nodes[5]])
    kernels = [lines.kernel(node) for node in nodes if node not in (nodes[1], nodes[5])]
    ordered = KernelGrouping(lines, joined, both).in_order([*kernels, both])
    assert [sorted(kernel.nodes) for kernel in ordered] == [["op0"], ["op3"], ["op4"], ["op1", "op5"], ["op2"]]
    assert not lines.keeps_memory(joined, nodes[1], nodes[5])  # g would live beside h
    del nodes[2]
    assert keeps(order(*nodes, g=4, sum=4, late=4, total=4, returned="total"), 1, 5)


def test_a_joined_kernel_runs_when_the_last_of_what_it_reads_is_made() -> None:
    nodes = [Node(0, "primals_1", "a"), Node(1, "primals_1", "z"), Node(2, "z", "y"), Node(3, "y", "b")]
    lines, joined = order(*nodes, returned="a b")
    both = Kernel.of([nodes[0], nodes[3]])
    assert KernelGrouping(lines, joined, both).place(both) == 2
    one = Joined(nodes[1], nodes[2])
    joined.update(op1=one, op2=one)
    assert KernelGrouping(lines, joined, both).place(both) == 1  # y is made earlier now


def test_a_long_row_of_kernels_that_wait_is_not_followed_to_its_end() -> None:
    count = 3 * DEPTH
    nodes = [Node(k, f"b{k - 2}", f"b{k}") for k in range(2 * count)]
    lines, joined = order(*nodes, returned=f"b{2 * count - 1}")
    for k in range(0, 2 * count - 3, 2):  # each reads what the one before makes last
        pair = Joined(nodes[k], nodes[k + 3])
        joined[f"op{k}"] = joined[f"op{k + 3}"] = pair
    grouping = KernelGrouping(lines, joined)
    last = grouping.kernel(f"op{2 * count - 4}")
    assert last.first <= grouping.place(last) <= last.last


@pytest.mark.parametrize("second", ["op0", "op1"])
def test_kernels_that_wait_for_each_other_have_a_place_all_the_same(second: str) -> None:
    nodes = [Node(0, "x", "a"), Node(1, "y", "b"), Node(2, "b", "c"), Node(3, "a", "d")]
    lines, joined = order(*nodes, returned="c d")
    left, right = Joined(nodes[0], nodes[2]), Joined(nodes[1], nodes[3])
    joined.update(op0=left, op2=left, op1=right, op3=right)
    grouping = KernelGrouping(lines, joined)
    assert 0 <= grouping.place(grouping.kernel(second)) <= 3
