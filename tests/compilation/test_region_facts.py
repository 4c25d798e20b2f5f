"""The nodes that each kernel computes and the bytes in use meanwhile, from a graph's code without kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compile_remat.compilation.region_facts import graph_facts
from compile_remat.compilation.region_run import run_region, run_unsplit
from compile_remat.inductor.observe import Emitted
from compile_remat.inductor.wrapper_dry_run import dry_run
from compile_remat.passes import GraphFacts, KernelFacts

KIB = 1024

ALLOCATE = "empty_strided_cpu((16, 16), (16, 1), torch.float32)"


def lowered(
    lines: list[str], nodes_of: Mapping[str, tuple[str, ...]], names: tuple[str, ...] = ("primals_1",), **kinds: Any
) -> Emitted:
    """A graph that returns one value, with inputs of 1 KiB each."""
    kernels = [f"kernel_{k} = async_compile.cpp_pybinding(['float*'], '')" for k in range(2)]
    source = "\n".join(
        [*kernels, "def call(args):", f"    {', '.join(names)}, = args", *(f"    {line}" for line in lines)]
    )
    inputs = tuple(torch.empty(16, 16) for _ in names)
    return Emitted(source, inputs, names, 1, kinds.pop("is_backward", False), nodes_of=nodes_of, **kinds)


def facts_of(graph: Emitted, beside_bytes: int = 0) -> GraphFacts:
    return graph_facts(graph, dry_run(graph.source_code, graph.inputs), beside_bytes)


LINES = [
    f"buf0 = {ALLOCATE}",
    "extern_kernels.mm(primals_1, primals_1, out=buf0)",
    f"buf1 = {ALLOCATE}",
    "kernel_0(buf0, buf1)",
    "del buf0",
    f"buf2 = {ALLOCATE}",
    "extern_kernels.mm(buf1, primals_1, out=buf2)",
    "del buf1",
    "return (buf2, )",
]
NODES = {"buf0": ("mm",), "buf1": ("cos", "sin"), "kernel_0": ("sin", "cos"), "buf2": ("mm_1",)}


def test_kernels_come_in_order_with_the_most_bytes_in_use() -> None:
    found = facts_of(lowered(LINES, NODES))
    peaks = {kernel.nodes[0]: kernel.live_bytes for kernel in found.kernels}
    assert peaks["mm"] == KIB and peaks["mm_1"] == 2 * KIB
    assert max(kernel.live_bytes for kernel in found.kernels) == 2 * KIB
    assert [kernel.nodes for kernel in found.kernels] == [("mm",), ("cos", "sin"), ("sin", "cos"), ("mm_1",)]
    assert found.computed == {"mm", "sin", "cos", "mm_1"}


def test_a_node_that_stays_inside_of_its_kernel_is_computed_and_not_stored() -> None:
    """``sin`` is in the kernel that writes ``cos``: its buffer is named for the latter."""
    found = facts_of(lowered(LINES, NODES))
    assert found.stored == {"mm": KIB, "cos": KIB, "mm_1": KIB}
    assert "sin" in found.computed


def test_a_name_that_belongs_to_no_node_counts_with_what_came_before_it() -> None:
    """A copy that the code generator made."""
    lines = [*LINES[:4], f"copied = {ALLOCATE}", "del copied", *LINES[4:]]
    found = facts_of(lowered(lines, NODES))
    assert found.stored.keys() == {"mm", "cos", "mm_1"}
    assert max(k.live_bytes for k in found.kernels if "cos" in k.nodes) == 3 * KIB


def test_the_largest_of_a_nodes_buffers_is_its_own() -> None:
    lines = [f"small = {ALLOCATE.replace('(16, 16)', '(4, 16)')}", *LINES]
    found = facts_of(lowered(lines, {**NODES, "small": ("mm",)}))
    assert found.stored["mm"] == KIB


def test_bytes_beside_the_graph_are_in_use_all_the_time() -> None:
    plain, beside = facts_of(lowered(LINES, NODES)), facts_of(lowered(LINES, NODES), 5 * KIB)
    assert [k.live_bytes + 5 * KIB for k in plain.kernels] == [k.live_bytes for k in beside.kernels]
    assert beside.stored == plain.stored


def test_without_nodes_there_are_no_facts_of_them() -> None:
    """Code that was emitted: the names of its kernels lead to no node."""
    found = facts_of(lowered(LINES, {}))
    assert (found.kernels, found.stored) == ((), {})


def test_the_buffers_at_the_peak_come_to_it() -> None:
    """Among them is the one whose making is the peak; each is called by its node."""
    found = facts_of(lowered(LINES, NODES))
    assert {(b.node, b.nbytes, b.is_workspace) for b in found.at_peak} == {("mm", KIB, False), ("cos", KIB, False)}
    assert sum(b.nbytes for b in found.at_peak) == found.peak_bytes


# -- of a region ------------------------------------------------------------------------------------------------------

FORWARD = lowered(
    [f"out = {ALLOCATE}", f"saved = {ALLOCATE}", "return (out, saved, )"], {"out": ("exp",), "saved": ("mm",)}
)
FORWARD = Emitted(FORWARD.source_code, FORWARD.inputs, FORWARD.names, 2, False, nodes_of=FORWARD.nodes_of)
BACKWARD = lowered(
    [f"g = {ALLOCATE}", "kernel_1(saved, tangents_1, g)", "del saved", f"h = {ALLOCATE}", "return (h, )"],
    {"g": ("mul",), "kernel_1": ("mul",), "h": ("mm_1",)},
    ("saved", "tangents_1"),
    is_backward=True,
)


def test_the_users_outputs_are_in_use_beside_the_backward() -> None:
    run = run_region(FORWARD, BACKWARD)
    facts = run.facts
    assert facts is not None and facts.peak_bytes == run.peak_bytes == 3 * KIB
    # ``out`` to the end, ``saved`` until it is dropped, then ``h`` in its place; both before any kernel runs.
    held, mul, mm_1 = facts.backward.kernels
    assert held == KernelFacts((), 2 * KIB)
    assert (mul, mm_1) == (KernelFacts(("mul",), 3 * KIB), KernelFacts(("mm_1",), 3 * KIB))
    assert facts.forward.kernels == (KernelFacts(("exp",), KIB), KernelFacts(("mm",), 2 * KIB))
    observed = [k.live_bytes for k in (*facts.forward.kernels, *facts.backward.kernels)]
    assert max(observed) == facts.peak_bytes, "what is assumed of the kernels comes to the peak"


def test_emitted_code_has_no_facts() -> None:
    graphs = [Emitted(g.source_code, g.inputs, g.names, g.num_outputs, g.is_backward) for g in (FORWARD, BACKWARD)]
    run = run_region(*graphs)
    assert run.facts is None and run.peak_bytes == 3 * KIB


def test_a_graph_that_is_not_split_has_no_facts_of_a_region() -> None:
    graph = lowered(LINES, NODES, is_inference=True)
    assert run_unsplit(graph).facts is None
