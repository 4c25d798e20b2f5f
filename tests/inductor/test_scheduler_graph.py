"""The scheduler's nodes as kernels: what is known of each buffer, what is live along them, and how the work grows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from compile_remat.inductor.scheduler_graph import Kernel, SchedulerGraph, reused_bytes
from tests.inductor.scheduler_nodes import Node, Scheduler, run_guard, run_order


def graph_of(*accesses: tuple[str, str, bool], returned: str = "") -> SchedulerGraph:
    """Nodes of what each reads and writes, and whether it is an unfused kernel; `a4` has 4 bytes."""
    nodes = [
        Node(place, reads, writes, place, is_extern=is_extern)
        for place, (reads, writes, is_extern) in enumerate(accesses)
    ]
    return SchedulerGraph(nodes, lambda dep: dep.name[1:], returned.split())


def test_who_makes_and_reads_what() -> None:
    graph = graph_of(("p1", "a4", False), ("a4", "b2", True), ("a4 b2", "c1", False), returned="c1")
    assert graph.maker == {"a4": "op0", "b2": "op1", "c1": "op2"}
    assert graph.readers == {"p1": ["op0"], "a4": ["op1", "op2"], "b2": ["op2"]}
    assert graph.bytes_of(["a4", "b2", "unknown"]) == 6
    assert [graph.outlives(name) for name in ("a4", "c1", "primals_1", "arg0_1")] == [False, True, True, True]


def test_unfused_kernels_between_two_places() -> None:
    graph = graph_of(*[("p1", f"b{place}", place in (2, 5)) for place in range(8)])
    for low in range(8):
        for high in range(8):
            assert graph.has_extern_between(low, high) == any(low < place < high for place in (2, 5))


def test_the_peak_of_a_sequence() -> None:
    """a and b beside each other, then c over a (in-place reuse), then d beside b and c."""
    graph = graph_of(("p1", "a4", False), ("p1", "b4", False), ("a4", "c4", False), ("b4 c4", "d2", True))
    kernels = [Kernel.of([node]) for node in graph.nodes]
    freed = {kernels[2]: {"a4"}, kernels[3]: {"b4", "c4"}}
    assert graph.peak_bytes(kernels, lambda k: k.writes, lambda k: freed.get(k, set())) == 10
    assert reused_bytes(kernels[2], {"c4"}, {"a4"}, graph.nbytes) == 4
    assert reused_bytes(kernels[3], {"d2"}, {"b4", "c4"}, graph.nbytes) == 0  # not Inductor's own


def test_what_two_nodes_of_a_kernel_read_is_written_over_by_neither() -> None:
    """Inductor asks each node of a kernel before any has run.  A node that waits for the other one may."""
    graph = graph_of(("a4 b4", "c4", False), ("a4", "d4", False))
    both = Kernel.of(graph.nodes)
    assert reused_bytes(both, both.writes, {"a4", "b4"}, graph.nbytes) == 4  # c over b, d over nothing
    graph = graph_of(("a4 b4", "c4", False), ("a4 c4", "d4", False))
    both = Kernel.of(graph.nodes)
    assert reused_bytes(both, both.writes, {"a4", "b4"}, graph.nbytes) == 8


def bytecodes(run: Callable[[Scheduler], int], count: int) -> tuple[int, int]:
    """The number of Python bytecodes that a pass over `count` nodes executes, and the pass's result."""
    scheduler, executed = Scheduler(count), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal executed
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        changed = run(scheduler)
    finally:
        sys.settrace(before)
    return executed, changed


@pytest.mark.parametrize("run", [run_guard, run_order])
def test_work_grows_about_linearly(run: Callable[[Scheduler], int]) -> None:
    """Past 64 layers, where Inductor compares a buffer's readers no further."""
    small, few = bytecodes(run, 600)
    large, many = bytecodes(run, 2400)
    assert few > 50 and 3.9 < many / few < 4.1
    assert large < 4.6 * small
