"""Prices of single nodes add up to the price of the fused groups that they run in.

The model of these tests takes 1 ns for a byte, 1 ns for a flop, 1000 ns for a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import fx

from compile_remat.cost_models import CostModel, Op, OpKind, UnitCost
from compile_remat.passes.graph.node_drafts import Draft
from compile_remat.passes.graph.pricing import price
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, REDUCTION, Kernel

LAUNCH_NS = 1000
X = ("x", 100)
"""A graph input of 100 bytes."""

KINDS = {
    POINTWISE: OpKind.POINTWISE,
    REDUCTION: OpKind.REDUCTION,
    EXTERN: OpKind.MATMUL,
    ITEM: OpKind.ITEM,
    CONSTANT: OpKind.CONSTANT,
}


@dataclass(frozen=True)
class Plain:
    """1 ns for each byte and each flop."""

    launch_time_ns: int = LAUNCH_NS
    cache_bytes: int = 0

    def op_time_ns(self, op: Op) -> int:
        return self.launch_time_ns + op.flops

    def arithmetic_time_ns(self, op: Op) -> int:
        return op.flops

    def traffic_time_ns(self, nbytes: int, cached_bytes: int = 0) -> int:
        return nbytes - cached_bytes


COST: CostModel = Plain()


def value(kernel: Kernel, nbytes: int, *sources: Draft, flops: int = 1, **fields: Any) -> Draft:
    """A node of the forward; `fields` are those of a draft."""
    op = Op("n", "t", KINDS[kernel], "float32", flops, 0, nbytes, False, False)
    return Draft(fx.Graph().placeholder("n"), op, kernel, nbytes, sources, **fields)


def step(kernel: Kernel, nbytes: int, *sources: Draft, flops: int = 1, **fields: Any) -> Draft:
    """A node of the backward."""
    return value(kernel, nbytes, *sources, flops=flops, in_forward=False, in_backward=True, **fields)


def times(drafts: Sequence[Draft]) -> list[int]:
    return [d.time_ns for d in drafts]


# -- a fused group shares its reads -----------------------------------------------------------------------------------


def test_a_shared_input_is_paid_by_its_first_reader() -> None:
    steps = [step(POINTWISE, 10, input_reads=(X,), is_output=True) for _ in range(3)]
    assert price([], steps, COST) == 3 * LAUNCH_NS + 100 + 3 * 10
    assert times(steps) == [LAUNCH_NS + 110, LAUNCH_NS + 10, LAUNCH_NS + 10]


def test_a_shared_buffer_is_paid_by_its_first_reader() -> None:
    buffer = value(EXTERN, 40, flops=7)
    steps = [step(POINTWISE, 10, buffer, is_output=True), step(REDUCTION, 2, buffer)]
    price([buffer], steps, COST)
    assert times([buffer, *steps]) == [LAUNCH_NS + 7, LAUNCH_NS + 50, LAUNCH_NS + 2]


def test_groups_that_do_not_fuse_share_nothing() -> None:
    """A kernel stands between the two: both read x and the buffer from memory."""
    buffer = value(EXTERN, 40)
    steps = [step(POINTWISE, 10, buffer, input_reads=(X,), depth=d, is_output=True) for d in (1, 2)]
    price([buffer], steps, COST)
    assert times(steps) == [LAUNCH_NS + 150] * 2


def test_an_input_that_is_read_twice_at_one_depth_is_not_another_input() -> None:
    steps = [
        step(POINTWISE, 10, input_reads=(X, ("y", 7)), is_output=True),
        step(POINTWISE, 10, input_reads=(("z", 3), X)),
    ]
    price([], steps, COST)
    assert times(steps) == [LAUNCH_NS + 117, 3]


# -- registers --------------------------------------------------------------------------------------------------------


def test_what_stays_in_registers_pays_arithmetic_only() -> None:
    """first reads x, middle reads and writes registers, last hands its result to a kernel of its own."""
    first = value(POINTWISE, 50, input_reads=(X,), flops=3)
    middle = value(POINTWISE, 50, first, flops=5)
    last = value(POINTWISE, 50, middle, flops=9)
    product = value(EXTERN, 10, last, flops=77)
    total = price([first, middle, last, product], [], COST)
    assert times([first, middle, product]) == [100, 5, LAUNCH_NS + 77]
    assert total == 100 + 5 + (LAUNCH_NS + 50) + (LAUNCH_NS + 77)


def test_arithmetic_counts_where_it_exceeds_the_traffic() -> None:
    steps = [step(POINTWISE, 10, input_reads=(X,), flops=flops, is_output=True) for flops in (500, 9)]
    price([], steps, COST)
    assert times(steps) == [LAUNCH_NS + 500, LAUNCH_NS + 10]


def test_the_write_for_a_kernel_of_the_forward_is_not_paid_again() -> None:
    """The step's time has the write and the launch; once more, the value stays in registers."""
    p = value(POINTWISE, 50, input_reads=(X,))
    product = value(EXTERN, 10, p, flops=7)
    gradient = step(POINTWISE, 20, p, is_output=True)
    total = price([p, product], [gradient], COST)
    assert total == (LAUNCH_NS + 100 + 50) + (LAUNCH_NS + 7) + (LAUNCH_NS + 50 + 20)
    assert total - sum(times([p, product, gradient])) == LAUNCH_NS + 50


def test_the_write_for_a_kernel_of_the_backward_is_paid_again() -> None:
    p = value(POINTWISE, 50, input_reads=(X,), is_materialised=True)
    assert price([p], [], COST) == p.time_ns == LAUNCH_NS + 150


@pytest.mark.parametrize("kernel", [ITEM, CONSTANT])
def test_parts_and_constants_cost_nothing(kernel: str) -> None:
    node = value(kernel, 50, input_reads=(X,), flops=9)
    assert price([node], [], COST) == 0
    assert (node.time_ns, node.save_time_ns) == (0, 0)


def residual(**fields: Any) -> tuple[list[Draft], list[Draft]]:
    """A sum of two products' results, which the forward reads for a statistic, and the backward in two groups."""
    a, b = value(EXTERN, 100), value(EXTERN, 100)
    total = value(POINTWISE, 100, a, b, flops=0, depth=1, **fields)
    wide = value(POINTWISE, 200, total, flops=0, depth=1)
    statistic = value(REDUCTION, 1, wide, depth=1)
    steps = [
        step(POINTWISE, 10, wide, statistic, depth=3, is_output=True),
        step(POINTWISE, 10, total, depth=5, is_output=True),
    ]
    return [a, b, total, wide, statistic], steps


@pytest.mark.parametrize("fields", [{}, {"is_materialised": True, "is_written_for_reads": True}])
def test_a_sum_in_registers_is_paid_in_each_group_of_its_readers(fields: dict[str, bool]) -> None:
    """Its readers, and those of its other forms, load both operands; saved, it is written once, and both gradients load it.

    The statistic, computed again, pays for its own load.
    """
    values, steps = residual(**fields)
    price(values, steps, COST)
    total, wide, statistic = values[2:]
    assert (total.time_ns, total.save_time_ns) == (3 * 200, 100 + 2 * 100)
    assert (wide.time_ns, statistic.time_ns) == (0, LAUNCH_NS + 100 + 1)


def test_a_sum_that_is_written_anyway_is_paid_once() -> None:
    values, steps = residual(is_materialised=True)
    price(values, steps, COST)
    assert (values[2].time_ns, values[2].save_time_ns) == (LAUNCH_NS + 200 + 100, 0)


def test_a_saved_sum_spares_the_forward_the_loads_of_its_operands() -> None:
    """The next sum of the forward loads it in place of two operands: what it saves is what the write costs."""
    values, steps = residual()
    total, other = values[2], value(EXTERN, 100, depth=1)
    values += [other, value(POINTWISE, 100, total, other, flops=0, depth=2, is_output=True)]
    price(values, steps, COST)
    assert (total.time_ns, total.save_time_ns) == (3 * 200, 0 + 2 * 100)


# -- separate reductions ----------------------------------------------------------------------------------------------


def test_readers_of_a_separate_reductions_result_load_its_operand_again() -> None:
    """A norm of columns: statistics first, then the elements; along rows one kernel does both."""
    for is_separate, times_read in ((False, 1), (True, 2)):
        x = step(EXTERN, 100, flops=0)
        total = step(REDUCTION, 10, x, depth=1, flops=0, is_separate=is_separate)
        norm = step(POINTWISE, 100, x, total, depth=1, flops=0, is_output=True)
        price([], [x, total, norm], COST)
        assert total.time_ns == LAUNCH_NS + 100 + 10
        assert norm.time_ns == LAUNCH_NS + 100 + (times_read - 1) * (100 + 10)


def test_separate_reductions_share_a_read() -> None:
    x = step(EXTERN, 100, flops=0)
    sums = [step(REDUCTION, 10, x, depth=1, flops=0, is_separate=True) for _ in range(2)]
    price([], [x, *sums], COST)
    assert times(sums) == [LAUNCH_NS + 110, LAUNCH_NS + 10]


def test_what_follows_a_reduction_of_results_is_a_third_kernel() -> None:
    x = step(EXTERN, 100, flops=0)
    rows = step(REDUCTION, 10, x, depth=1, flops=0)
    total = step(REDUCTION, 1, rows, depth=1, flops=0, is_separate=True)
    scaled = step(POINTWISE, 100, x, total, depth=1, flops=0, is_output=True)
    price([], [x, rows, total, scaled], COST)
    assert times([rows, total, scaled]) == [LAUNCH_NS + 110, LAUNCH_NS + 11, LAUNCH_NS + 100 + 100 + 1]


# -- registers of several kernels -------------------------------------------------------------------------------------


def test_a_kernel_does_not_load_what_it_has_written() -> None:
    """The first node's result goes to a product, and stays in registers for the second."""
    first = step(POINTWISE, 50, input_reads=(X,), flops=0, is_materialised=True)
    second = step(POINTWISE, 50, first, flops=0, is_output=True)
    price([], [first, second, step(EXTERN, 10, first)], COST)
    assert times([first, second]) == [LAUNCH_NS + 150, LAUNCH_NS + 50]


def test_another_form_loads_what_its_operand_loads() -> None:
    """A product of two casts in registers: the backward's later kernel loads both of the half as large originals."""
    a, b = (step(EXTERN, 50, flops=0) for _ in range(2))
    wide = [step(POINTWISE, 100, each, depth=1, flops=0) for each in (a, b)]
    product = step(POINTWISE, 100, *wide, depth=1, flops=0)
    readers = [step(POINTWISE, 10, product, depth=d, flops=0, is_output=True) for d in (1, 3)]
    price([], [a, b, *wide, product, *readers], COST)
    assert sum(times([*wide, product])) == 2 * (50 + 50)
    assert times(readers) == [LAUNCH_NS + 10] * 2


def test_a_part_is_written_into_the_concatenation_once() -> None:
    """The other part is loaded, and both are not written twice."""
    part = step(POINTWISE, 60, input_reads=(X,), flops=0, is_materialised=True)
    other = step(EXTERN, 40, flops=0)
    whole = step(POINTWISE, 100, part, other, depth=1, flops=0, is_materialised=True, parts=[part])
    price([], [part, other, whole, step(EXTERN, 10, whole, depth=1)], COST)
    assert times([part, whole]) == [LAUNCH_NS + 100 + 60, LAUNCH_NS + 40 + 40]


def test_a_sum_that_the_next_one_reads_is_not_loaded_for_it_once_more() -> None:
    """Saved, a residual sum is loaded by its norm's gradient; the next sum pays for its operands itself."""
    a, b, c = (value(EXTERN, 100, flops=0) for _ in range(3))
    total = value(POINTWISE, 100, a, b, depth=1, flops=0)
    after = value(POINTWISE, 100, total, c, depth=2, flops=0)
    steps = [step(POINTWISE, 10, each, depth=d, flops=0, is_output=True) for each, d in ((after, 3), (total, 5))]
    price([a, b, c, total, after], steps, COST)
    assert total.save_time_ns == 100 + 100


# -- recomputed values ------------------------------------------------------------------------------------------------


def test_a_recomputed_value_does_not_pay_for_what_its_gradients_kernel_loads() -> None:
    """GELU: the gradient's kernel loads the operand for the derivative, and the value once more costs its write."""
    x = value(EXTERN, 100, flops=0)
    gelu = value(POINTWISE, 100, x, depth=1, flops=0, is_materialised=True)
    gradient = step(POINTWISE, 100, x, depth=1, flops=0, is_output=True)
    total = price([x, gelu], [gradient, step(EXTERN, 10, gelu, depth=1, flops=0)], COST)
    assert times([gelu, gradient]) == [LAUNCH_NS + 100, LAUNCH_NS + 200]
    assert total == LAUNCH_NS + (LAUNCH_NS + 100 + 100) + (LAUNCH_NS + 200) + LAUNCH_NS


def test_the_backward_has_groups_of_its_own() -> None:
    """Depths count kernels of libraries in both graphs: equal ones do not make a step share the forward's loads."""
    forward = value(POINTWISE, 10, input_reads=(X,), depth=1, flops=0, is_output=True)
    backward = step(POINTWISE, 10, input_reads=(X,), depth=1, flops=0, is_output=True)
    assert price([forward], [backward], COST) == 2 * (LAUNCH_NS + 110)


# -- saving -----------------------------------------------------------------------------------------------------------


def test_what_only_the_backward_needs_costs_the_forward_nothing_until_it_is_saved() -> None:
    """The cosine for a sine: saved, the forward computes and writes it, and the backward loads it."""
    x = value(EXTERN, 100, flops=0)
    sine = value(POINTWISE, 100, x, depth=1, flops=1, is_output=True)
    cosine = value(POINTWISE, 100, x, depth=1, flops=7, in_forward=False)
    gradient = step(POINTWISE, 100, cosine, depth=1, flops=0, is_output=True)
    total = price([x, sine, cosine], [gradient], COST)
    assert total == LAUNCH_NS + (LAUNCH_NS + 200) + (LAUNCH_NS + 100)
    assert (cosine.time_ns, cosine.save_time_ns) == (100, 7 + 100 + 100)


def test_saving_has_the_work_for_sources_that_only_it_reads() -> None:
    x = value(EXTERN, 100, flops=0)
    alone = value(POINTWISE, 100, x, flops=3, depth=1, in_forward=False)
    shared = value(POINTWISE, 100, x, flops=5, depth=1, in_forward=False)
    saved = value(POINTWISE, 100, alone, shared, flops=7, depth=1, in_forward=False)
    steps = [step(POINTWISE, 100, each, depth=1, flops=0, is_output=True) for each in (saved, shared)]
    price([x, alone, shared, saved], steps, COST)
    assert saved.save_time_ns == 100 + 7 + 100 + 100, "the first node loads x"
    assert shared.save_time_ns == 5 + 100 + 100


def test_saving_a_value_of_registers_costs_its_write_and_its_read() -> None:
    p = value(POINTWISE, 50, input_reads=(X,))
    price([p], [step(POINTWISE, 20, p, is_output=True)], COST)
    assert p.save_time_ns == 50 + 50


def test_saving_what_the_forward_writes_anyway_costs_its_read() -> None:
    """One is read by a kernel of its own, the other is returned."""
    read, returned = value(POINTWISE, 50), value(POINTWISE, 50, is_output=True)
    gradient = step(POINTWISE, 20, read, returned, is_output=True)
    price([read, returned, value(EXTERN, 10, read)], [gradient], COST)
    assert (read.save_time_ns, returned.save_time_ns) == (50, 50)


def test_saving_what_the_backward_reads_from_memory_costs_its_write() -> None:
    p = value(POINTWISE, 50)
    price([p], [step(EXTERN, 20, p)], COST)
    assert p.save_time_ns == 50


def test_saving_a_buffer_of_both_costs_nothing() -> None:
    p, q = value(POINTWISE, 50, is_materialised=True), value(POINTWISE, 50)
    price([p, q, value(EXTERN, 10, q)], [step(EXTERN, 20, q)], COST)
    assert (p.save_time_ns, q.save_time_ns) == (0, 0)


@pytest.mark.parametrize("kernel", [EXTERN, REDUCTION])
def test_saving_what_is_a_buffer_by_itself_costs_nothing(kernel: str) -> None:
    node = value(kernel, 50)
    price([node], [step(POINTWISE, 20, node, is_output=True)], COST)
    assert node.save_time_ns == 0


# -- the cache --------------------------------------------------------------------------------------------------------


def test_what_was_just_written_is_read_from_the_cache() -> None:
    """Here a byte out of the cache is free."""
    product = value(EXTERN, 40, flops=7)
    near = step(POINTWISE, 10, product, depth=1, is_output=True)
    far = step(POINTWISE, 10, product, depth=2, is_output=True)
    price([product], [near, far], Plain(cache_bytes=60))
    assert times([near, far]) == [LAUNCH_NS + 10, LAUNCH_NS + 10 + 40], "the 50 bytes of the first came between"
    price([product], [near, far], Plain(cache_bytes=1000))
    assert times([near, far]) == [LAUNCH_NS + 10, LAUNCH_NS + 10]
    price([product], [near, far], COST)
    assert times([near, far]) == [LAUNCH_NS + 50, LAUNCH_NS + 50]


def test_what_other_kernels_move_pushes_a_result_out_of_the_cache() -> None:
    product = value(EXTERN, 40, flops=7)
    other = value(EXTERN, 500)
    reader = step(POINTWISE, 10, product, depth=1, is_output=True)
    price([product, other], [reader], Plain(cache_bytes=100))
    assert reader.time_ns == LAUNCH_NS + 50


def test_inputs_come_from_memory() -> None:
    reader = step(POINTWISE, 10, input_reads=(X,), is_output=True)
    price([], [reader], Plain(cache_bytes=10**9))
    assert reader.time_ns == LAUNCH_NS + 110


# -- the sum ----------------------------------------------------------------------------------------------------------


def test_step_time_is_the_sum() -> None:
    product = value(EXTERN, 40, flops=7)
    p = value(POINTWISE, 40, product, flops=2, depth=1)
    total = value(REDUCTION, 4, p, flops=2, depth=1)
    gradient = step(POINTWISE, 40, p, flops=2, depth=1)
    last = step(EXTERN, 60, gradient, product, flops=9, depth=1, is_output=True)
    nodes = [product, p, total, gradient, last]
    found = price(nodes[:3], nodes[3:], COST)
    assert times(nodes) == [LAUNCH_NS + 7, 40, LAUNCH_NS + 4, LAUNCH_NS + 40, LAUNCH_NS + 9]
    assert found == sum(times(nodes))


def test_a_sliced_call_costs_what_is_in_it() -> None:
    """Its time is that of a graph of its own, in the step as when it is run again."""
    call = value(EXTERN, 40, flops=7, inner_time_ns=12_345)
    assert price([call], [], COST) == call.time_ns == 12_345


def test_unit_cost_counts_the_kernels() -> None:
    """Bytes are free there: saving costs nothing, fused or not."""
    product = value(EXTERN, 40)
    item = value(ITEM, 40, product)
    p = value(POINTWISE, 40, item)
    gradients = [step(POINTWISE, 40, p), step(EXTERN, 60, item, is_output=True)]
    assert price([product, item, p], gradients, UnitCost()) == 4
    assert times([product, item, p, *gradients]) == [1, 0, 1, 1, 1]
    assert [d.save_time_ns for d in (product, item, p)] == [0, 0, 0]


def test_a_saved_mask_costs_its_slow_loads_and_stores() -> None:
    p = value(POINTWISE, 50, input_reads=(X,))
    p.mask_factor = 8
    price([p], [step(POINTWISE, 20, p, is_output=True)], COST)
    assert p.save_time_ns == 8 * (50 + 50)
