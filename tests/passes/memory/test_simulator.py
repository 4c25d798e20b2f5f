"""The batch simulator against the slow walk, and small problems that can be checked by hand."""

import random

import numpy as np
import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from compile_remat.passes.memory import simulator
from compile_remat.passes.memory.plan_timeline import timeline_of
from compile_remat.passes.memory.reader_levels import WIDE_BATCH
from compile_remat.passes.memory.simulator import Batch, Simulator
from compile_remat.passes.problem.problem import CONSTANT, EXTERN, ITEM, POINTWISE, Problem, Step, Value
from tests.oracles.random_problems import Shape, chain, observed_problems, problems, seeded_problem
from tests.oracles.slow_walk import slow_run


def mask_of(problem: Problem, saved: list[int]) -> np.ndarray:
    mask = np.zeros((len(problem.values), 1), dtype=bool)
    mask[saved] = True
    return mask


def columns_of(problem: Problem, choices: list[int]) -> np.ndarray:
    """A plan a column: it saves the values whose bits are set and that may be saved."""
    rows = [[value.is_saveable and bits >> v & 1 for bits in choices] for v, value in enumerate(problem.values)]
    return np.array(rows, dtype=bool)


def kernels_of(problem: Problem, batch: Batch) -> tuple[str, ...]:
    names = [""] * (int(batch.step_slots[0, -1]) + 1)
    for v in np.flatnonzero(batch.recomputed[:, 0]):
        names[batch.slots[v, 0]] = problem.values[v].name
    for b, slot in enumerate(batch.step_slots[0]):
        names[slot] = problem.steps[b].name
    return tuple(names)


def report(problem: Problem, saved: list[int]) -> str:
    """Live bytes of one plan, kernel by kernel, after checking them against the slow walk."""
    batch = Simulator(problem).run(mask_of(problem, saved))
    kernels = kernels_of(problem, batch)
    assert slow_run(problem, saved).live_bytes == tuple(batch.live[0].tolist())
    rows = [f"{name:<8}{live}" for name, live in zip(kernels, batch.live[0].tolist(), strict=True)]
    return "\n".join([*rows, f"forward {int(batch.forward_peak[0])}, time {int(batch.time_ns[0])}"])


@given(problems | observed_problems, st.integers(0, 2**16 - 1))
def test_equals_the_slow_walk(problem: Problem, bits: int) -> None:
    saved = [v for v, value in enumerate(problem.values) if bits >> v & 1 and value.is_saveable]
    batch = Simulator(problem).run(mask_of(problem, saved))
    slow = slow_run(problem, saved)
    assert kernels_of(problem, batch) == slow.kernels
    assert tuple(batch.live[0].tolist()) == slow.live_bytes
    assert int(batch.forward_peak[0]) == slow.forward_peak_bytes
    assert int(batch.peak[0]) == slow.peak_bytes
    assert set(np.flatnonzero(batch.used[:, 0]).tolist()) == slow.saved
    assert set(np.flatnonzero(batch.recomputed[:, 0]).tolist()) == slow.recomputed
    assert int(batch.time_ns[0]) == slow.time_ns


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_plans_of_many_problems_equal_the_slow_walk(first: int) -> None:
    """More than hypothesis draws in a run, and the same ones in every run."""
    for seed in range(first, first + 100):
        problem, rng = seeded_problem(seed, Shape(max_values=10, with_memory_of_kernels=True)), random.Random(seed)
        columns = np.array([[v.is_saveable and rng.random() < 0.4 for _ in range(3)] for v in problem.values])
        batch = Simulator(problem).run(columns)
        for k in range(3):
            slow = slow_run(problem, np.flatnonzero(columns[:, k]).tolist())
            assert (int(batch.forward_peak[k]), int(batch.peak[k])) == (slow.forward_peak_bytes, slow.peak_bytes), seed
            assert tuple(batch.live[k, : len(slow.live_bytes)].tolist()) == slow.live_bytes, seed
        if seed % 10 == 0:
            wide = Simulator(problem).run(np.tile(columns, WIDE_BATCH))
            assert wide.peak.tolist() == batch.peak.tolist() * WIDE_BATCH, seed
            assert wide.forward_peak.tolist() == batch.forward_peak.tolist() * WIDE_BATCH, seed


@given(problems, st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=6))
def test_a_batch_equals_its_plans_one_by_one(problem: Problem, choices: list[int]) -> None:
    columns = columns_of(problem, choices)
    simulator = Simulator(problem)
    together = simulator.run(columns)
    for k in range(len(choices)):
        alone = simulator.run(columns[:, k : k + 1])
        length = alone.live.shape[1]
        assert (together.live[k, :length] == alone.live[0]).all()
        assert not together.live[k, length:].any()
        for name in ("time_ns", "saved_bytes", "forward_peak", "peak"):
            assert getattr(together, name)[k] == getattr(alone, name)[0]
        assert (together.step_slots[k] == alone.step_slots[0]).all()


@given(problems, st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20))
def test_times_and_least_peaks_without_a_simulation(problem: Problem, choices: list[int]) -> None:
    columns = columns_of(problem, choices)
    simulator = Simulator(problem)
    batch = simulator.run(columns)
    used, recomputed = simulator.schedules.needs(columns)
    assert (used == batch.used).all()
    assert (recomputed == batch.recomputed).all()
    times_ns, least_peaks = simulator.at_least(columns)
    assert (times_ns == batch.time_ns).all()
    assert (batch.saved_bytes <= least_peaks).all() and (least_peaks <= batch.peak).all()
    assert (simulator.forward.least_peaks(used) <= batch.forward_peak).all()


def test_pointwise_chain_stays_in_registers() -> None:
    """`relu` and `exp` take no memory; `mm` lives until the kernel that reads it through them, `dexp` is written over `dmm`."""
    values = (
        Value("mm", 4, EXTERN, (), 9),
        Value("relu", 4, POINTWISE, (0,), 1, position=1),
        Value("exp", 4, POINTWISE, (1,), 1, position=2),
    )
    steps = (
        Step("dmm", 4, EXTERN, (), (), 1),
        Step("dexp", 4, POINTWISE, (2,), (0,), 1),
        Step("drelu", 4, EXTERN, (), (1,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (2,)),
    )
    assert_expected_inline(
        report(Problem(values, steps), [0]),
        """\
dmm     8
relu    8
exp     8
dexp    8
drelu   8
output  4
forward 4, time 2""",
    )


def test_what_stands_behind_a_concatenation_reads_a_part_from_it() -> None:
    """`skip` has no buffer of its own: `whole` writes it, and `pool`, computed behind it, keeps all of `whole` and not `conv`."""
    values = (
        Value("conv", 4, EXTERN, (), 9),
        Value("skip", 4, POINTWISE, (0,), 1, position=1),
        Value("pool", 1, POINTWISE, (1,), 1, position=2),
        Value("whole", 8, POINTWISE, (1,), 1, realised=True, position=3, parts=(1,)),
    )
    steps = (
        Step("dwhole", 2, EXTERN, (3,), (), 1),
        Step("dpool", 2, EXTERN, (2,), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    assert_expected_inline(
        report(Problem(values, steps), [0]),
        """\
skip    4
whole   12
dwhole  10
pool    11
dpool   5
output  2
forward 12, time 3""",
    )


def test_late_values_start_as_torch_walks() -> None:
    """A late value's missing ancestors stand in front of it, not in front of what came before in the same burst."""
    values = (
        Value("a", 1, EXTERN, (), 1),
        Value("b", 1, EXTERN, (), 1, position=2),
        Value("late_b", 1, EXTERN, (1,), 1, in_forward=False, position=3, late_step=1),
        Value("late_a", 1, EXTERN, (0,), 1, in_forward=False, position=1, late_step=1),
    )
    steps = (
        Step("g0", 1, EXTERN, (), (), 1),
        Step("g1", 1, EXTERN, (2, 3), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    assert_expected_inline(
        report(Problem(values, steps), []),
        """\
g0      1
b       2
late_b  3
a       3
late_a  4
g1      4
output  1
forward 1, time 4""",
    )


def test_parts_come_with_their_kernel() -> None:
    """Both parts live from the kernel on, which frees its input; a saved part is written once more for its sibling."""
    values = (
        Value("x", 8, EXTERN, (), 1),
        Value("split", 0, EXTERN, (0,), 1, position=1),
        Value("left", 2, ITEM, (1,), 0, position=2),
        Value("right", 4, ITEM, (1,), 0, position=3),
    )
    steps = (
        Step("g0", 1, EXTERN, (2,), (), 1),
        Step("g1", 1, EXTERN, (3,), (0,), 1, is_output=True),
        Step("output", 0, CONSTANT, (), (1,)),
    )
    assert_expected_inline(
        "\n\n".join([report(Problem(values, steps), []), report(Problem(values, steps), [0, 3])]),
        """\
x       8
split   14
left    6
g0      7
right   5
g1      6
output  1
forward 14, time 2

split   18
left    6
g0      7
g1      6
output  1
forward 14, time 1""",
    )


@given(problems, st.integers(0, 2**16 - 1))
def test_what_is_named_at_the_peak_adds_up_to_it(problem: Problem, bits: int) -> None:
    """But for what has no name of its own: outputs that nothing reads, and saved parts that are written once more."""
    mask = np.array([bits >> v & 1 and value.is_saveable for v, value in enumerate(problem.values)], dtype=bool)
    found = timeline_of(Simulator(problem), mask, keep=100)
    named = sum(buffer.nbytes for buffer in found.largest)
    has_parts = any(
        n.kernel == ITEM or n.transient_bytes or n.workspace_bytes for n in (*problem.values, *problem.steps)
    )
    assert named <= max(found.live_bytes) if has_parts else named == max(found.live_bytes)


@given(problems, st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40))
def test_parts_of_a_batch_equal_the_whole(problem: Problem, choices: list[int]) -> None:
    columns = columns_of(problem, choices)
    tried = Simulator(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "BATCH_CELLS", 7 * (len(problem.values) + len(problem.steps)))
        parts = list(tried.batches(columns))
    assert [part.used.shape[1] for part in parts] == [len(choices[k : k + 7]) for k in range(0, len(choices), 7)]
    whole = tried.run(columns)
    for name in ("time_ns", "peak", "saved_bytes"):
        assert (np.concatenate([getattr(part, name) for part in parts]) == getattr(whole, name)).all()


def test_a_plan_is_simulated_once() -> None:
    problem = chain(simulator.KEPT + 2)
    tried = Simulator(problem)
    masks = [mask_of(problem, [k])[:, 0] for k in range(simulator.KEPT + 2)]
    first = [tried.one(mask) for mask in masks]
    assert tried.one(masks[-1].copy()) is first[-1]
    assert tried.one(masks[0]) is not first[0]  # only so many are kept
    assert (tried.one(masks[0]).live == first[0].live).all()
