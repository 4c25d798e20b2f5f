"""Shapes that vary: a budget is kept at every size."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import compile_remat
from compile_remat import BudgetError, PlannerWarning, Report
from compile_remat._util.size_range import SizeRange, Sizes
from compile_remat.backend import remat
from compile_remat.device.measure import peak_bytes
from compile_remat.passes import Plan, Status
from compile_remat.planning.plain_peaks import largest_plain_bytes
from compile_remat.planning.request import Request
from compile_remat.runtime.process_state import clear_process_state
from compile_remat.runtime.region import CallInFlight, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.size_ladder import RUNGS, Rung, SizeLadder
from tests.processes import run
from tests.threads import run_at_once

KIB = 1024
WIDTH = 32


class Block(nn.Module):
    """A feed-forward block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sin(self.up(self.norm(x))))


def compiled(
    budget: object, compiler: str = "inductor", blocks: int = 4, **keywords: Any
) -> Callable[..., torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(blocks)])
    options = {"memory_budget": budget, "compiler": compiler}
    return torch.compile(model, backend=remat, options=options, **keywords)


def step(call: Any, x: torch.Tensor) -> None:
    call.zero_grad(set_to_none=True)
    call(x).backward(x)


def peak_of(call: Any, *shape: int) -> int:
    """Measured peak of a step on a batch of this shape, whose plan is there already."""
    x = torch.randn(*shape, WIDTH)
    step(call, x)
    call.zero_grad(set_to_none=True)
    return peak_bytes(lambda: step(call, x), "cpu").peak_bytes


def ranges() -> list[SizeRange]:
    return [report.size_range for report in compile_remat.reports() if report.size_range is not None]


@pytest.mark.usefixtures("empty_kernels")
def test_a_batch_that_grows_keeps_the_budget() -> None:
    """With the plan for 128 rows alone, 560 rows take more than twice the budget."""
    call = compiled(1024 * KIB)
    peaks = [peak_of(call, rows) for rows in (64, 128, 400, 560, 64)]
    assert max(peaks) <= 1024 * KIB and peaks[0] == peaks[-1]
    found = ranges()  # the first graph has fixed shapes
    assert len(found) == len(compile_remat.reports()) - 1 == 3
    assert [r.planned[0] for r in found] == sorted(r.planned[0] for r in found)
    assert all(r.planned[0] <= r.upper[0] <= r.carried[0] for r in found)
    assert f"up to {found[0].upper[0]} (planned for 128)" in str(compile_remat.reports()[1])


LONGEST = 330
"""Two blocks carry it in 1 MiB, in batches of two."""


def lengths_of(order: str) -> list[int]:
    """Lengths of sequences, in batches of two."""
    numbers = random.Random(0)
    if order == "random":
        return [numbers.randint(8, LONGEST) for _ in range(200)]
    grown = list(range(20, LONGEST + 1, 20))
    return {"growing": grown, "shrinking": grown[::-1], "jumping": [20, LONGEST, 30, 250, 40, 300]}[order]


def batch_of(length: int, *, is_first: bool) -> torch.Tensor:
    x = torch.randn(2, length, WIDTH)
    if is_first:
        torch._dynamo.mark_dynamic(x, 1)
    return x


@pytest.mark.usefixtures("own_caches")
@pytest.mark.parametrize(
    "order",
    [
        pytest.param("random", marks=pytest.mark.proof),
        *(pytest.param(order, marks=pytest.mark.full) for order in ("growing", "shrinking", "jumping")),
    ],
)
def test_lengths_run_within_the_range_of_a_plan_and_in_one_graph_of_dynamos(order: str) -> None:
    """Plain torch.compile compiles as many; the plans of the ladder are no recompilations of Dynamo's."""
    budget_bytes, counts = 1024 * KIB, []
    for call in (torch.compile(Block(), backend="aot_eager"), compiled(budget_bytes, "eager", blocks=2)):
        torch.compiler.reset()
        compile_remat.reset_reports()
        counters.clear()
        for k, length in enumerate(lengths_of(order)):
            step(call, batch_of(length, is_first=not k))
        counts.append(counters["stats"]["unique_graphs"])
    assert counts == [1, 1]
    found = ranges()
    assert len(found) == len(compile_remat.reports()) <= RUNGS and (order == "shrinking" or len(found) > 1)
    assert max(r.upper[0] for r in found) >= max(lengths_of(order))
    assert all((report.predicted_peak_bytes or 0) <= budget_bytes for report in compile_remat.reports())
    with pytest.raises(BudgetError) as caught:
        step(call, torch.randn(2, 600, WIDTH))
    assert caught.value.floor_bytes > budget_bytes
    step(call, torch.randn(2, 50, WIDTH))  # training goes on


@pytest.mark.full
@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("order", ["random", "growing", "shrinking", "jumping"])
def test_no_step_is_above_its_budget_at_any_length(order: str) -> None:
    """Twice with the same caches, the second time in the opposite order, as another process would."""
    lengths = lengths_of(order)
    for seen in (lengths, lengths[::-1]):
        torch.compiler.reset()
        clear_process_state()
        call = compiled(1024 * KIB, blocks=2)
        step(call, batch_of(seen[0], is_first=True))
        for length in seen:
            step(call, batch_of(length, is_first=False))
        assert max(peak_of(call, 2, length) for length in sorted(set(seen))) <= 1024 * KIB


@pytest.mark.usefixtures("empty_kernels")
def test_plans_for_larger_sizes_out_of_a_cache_raise_what_a_fraction_is_of() -> None:
    """As in a second process, which never plans and has the same bytes all the same."""
    bases = []
    for _ in range(2):
        torch.compiler.reset()
        clear_process_state()
        call = compiled(0.6, blocks=1)
        for k, length in enumerate((40, 400)):
            step(call, batch_of(length, is_first=not k))
        bases.append(largest_plain_bytes("cpu"))
    assert [report.from_cache for report in compile_remat.reports()[-2:]] == [True, True]
    assert bases[0] == bases[1] > 2 * 400 * WIDTH * 4  # the long batch's bytes: no less than its input and output


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize(
    "budget", [1536 * KIB, pytest.param(0.7, marks=pytest.mark.full), pytest.param("min", marks=pytest.mark.full)]
)
def test_graphs_of_one_step_keep_their_budget_at_larger_sizes(
    budget: float | str, recwarn: pytest.WarningsRecorder
) -> None:
    """Each graph gets another plan beside what the ones before it hold; then plans for the larger sizes are chosen together."""
    torch.manual_seed(0)
    first, second = (nn.Sequential(Block(), Block()) for _ in range(2))

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)  # type: ignore[no-any-return]

    call = torch.compile(broken, backend=remat, options={"memory_budget": budget})
    peaks = []
    for k, length in enumerate((150, 330, 330, 330, 100)):
        x = batch_of(length, is_first=not k)
        nn.ModuleList([first, second]).zero_grad(set_to_none=True)
        peaks.append(peak_bytes(lambda x=x: call(x).backward(x), "cpu").peak_bytes)  # type: ignore[misc]
    limit_bytes = 0.72 * largest_plain_bytes("cpu") if budget == 0.7 else 1536 * KIB
    assert budget == "min" or max(peaks) <= limit_bytes
    assert peaks[2] == peaks[3] > peaks[4]
    assert not [w for w in recwarn if "may exceed memory_budget" in str(w.message)]


@pytest.mark.full
def test_two_processes_that_see_the_lengths_in_opposite_orders(tmp_path: Path) -> None:
    """With one folder of caches: no step is above its budget in either, and a fraction has the bytes of the sizes seen so far."""
    jobs = [
        {"memory_budget": 1024 * KIB, "lengths": [20, 150, LONGEST]},
        {"memory_budget": 0.6, "lengths": [40, 400, 1600, 40]},
    ]
    turned = [{**job, "lengths": job["lengths"][::-1]} for job in jobs]
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    in_bytes, fraction = run(jobs, caches, script="lengths")
    *opposite, again = run([*turned, jobs[1]], caches, script="lengths")
    for found in (in_bytes, opposite[0]):
        assert max(found["peaks"]) <= 1024 * KIB
    for found in (fraction, opposite[1], again):
        assert all(peak <= 0.6 * plain for peak, plain in zip(found["peaks"], found["plain"], strict=True))
    assert max(fraction["plain"]) == max(opposite[1]["plain"]) and again["plain"] == fraction["plain"]
    assert again["from_cache"] == again["plans"] and opposite[0]["peaks"][0] == in_bytes["peaks"][-1]
    assert not any(message for found in (in_bytes, fraction, *opposite, again) for message in found["messages"])


@pytest.mark.usefixtures("own_caches")
def test_a_fraction_at_any_length_is_one_of_what_plain_takes_there() -> None:
    """One plan or a ladder, and never an error: gradients of weights are a smaller part of the peak of a longer batch."""
    call = compiled(0.6, "eager", blocks=2)
    for k, length in enumerate((40, 400, 4000, 10)):
        step(call, batch_of(length, is_first=not k))
    reports = compile_remat.reports()
    assert len(reports) <= RUNGS and max(r.upper[0] for r in ranges()) >= 4000
    for report in reports:
        assert report.plan is not None and report.plan.is_feasible and report.message == ""
        assert report.plain is not None and report.budget_bytes == int(0.6 * report.plain.peak_bytes)


# -- the ladder itself, without a compiler ----------------------------------------------------------------------------

CARRIED = 1000
"""Rows that the lowest plan below carries in its budget."""


def running(planned: tuple[int, ...], reach: float = 1.2, carried: tuple[int, ...] = (CARRIED,)) -> RunningPlan:
    """A plan that keeps its budget up to `reach` times the sizes that it was made for, and is the slower the larger these are."""
    upper = tuple(int(reach * n) for n in planned)
    names = tuple(f"s{k}" for k in range(len(planned)))
    plan = Plan("key", Status.FEASIBLE, 100, (str(planned),), (), 100, 100, 50, 1000, 0, sum(planned), 0)
    report = Report("key", "100", 100, plan, size_range=SizeRange(names, planned, upper, carried))
    return RunningPlan(lambda *args: (args[-1] * 2,), report)


class Compiler:
    """Makes a plan for any sizes up to those that the budget carries."""

    def __init__(self, most: int = CARRIED) -> None:
        self.most, self.planned = most, list[tuple[int, ...]]()
        self.result: Callable[[tuple[int, ...]], RunningPlan | None] = running

    def __call__(self, request: Request, sizes: Sizes) -> RunningPlan | None:
        planned = tuple(n for _, n in sizes)
        if max(planned) > self.most:
            raise BudgetError(100, 200)
        self.planned.append(planned)
        return self.result(planned)


def ladder(compiler: Compiler, *first: int) -> tuple[CompiledRegion, list[Report]]:
    published: list[Report] = []
    start = running(first, carried=(CARRIED,) * len(first))
    names = [(f"s{k}", k) for k in range(len(first))]

    def publish(report: Report, *, replaces: bool = True) -> None:
        assert not replaces  # plans for smaller sizes go on running
        published.append(report)

    return CompiledRegion(start, [SizeLadder(names, start)], compiler, publish), published


def served(region: CompiledRegion, *sizes: int) -> tuple[int, ...]:
    """The sizes of the class that a call of these sizes runs under."""
    region(*sizes, torch.ones(3, requires_grad=True))
    found = region.running.report.size_range
    assert found is not None
    return found.planned


def test_a_size_that_fits_compiles_nothing() -> None:
    compiler = Compiler()
    region, published = ladder(compiler, 100)
    assert [served(region, n) for n in (100, 7, 120)] == [(100,)] * 3
    assert not compiler.planned and not published


def test_sizes_that_shrink_get_the_faster_plan_back() -> None:
    region, published = ladder(Compiler(), 100)
    large = served(region, 300)
    assert large >= (300,)
    assert served(region, 50) == (100,) and served(region, 299) == large
    assert [report.size_range.planned for report in published if report.size_range] == [large]


def test_sizes_that_grow_one_by_one_need_few_plans() -> None:
    compiler = Compiler()
    region, published = ladder(compiler, 20)
    for n in range(20, CARRIED + 1):
        assert max(served(region, n)) * 1.2 >= n
    assert len(published) == len(compiler.planned) < RUNGS


def test_above_what_any_plan_carries_it_raises_before_the_step() -> None:
    compiler = Compiler()
    region, published = ladder(compiler, 100)
    for n in (2000, 3000):  # the second error is known
        with pytest.raises(BudgetError):
            served(region, n)
    assert not published and served(region, 110) == (100,)
    assert served(region, 900) == (900,) and served(region, 1000) == (900,)  # its own range reaches there


def test_a_class_that_is_too_wide_falls_back_to_the_sizes_of_the_call() -> None:
    compiler = Compiler(most=310)
    region, _ = ladder(compiler, 250)
    assert served(region, 305) == (305,)


def test_there_are_at_most_eight_plans_and_then_a_warning() -> None:
    compiler = Compiler(10**9)
    region, published = ladder(compiler, 10, 10)
    shapes = [(10 * 3**k, 10 + k) for k in range(12)]
    with pytest.warns(PlannerWarning, match="may exceed memory_budget") as seen:
        for shape in shapes:
            served(region, *shape)
    assert len(compiler.planned) == len(published) == RUNGS - 1 and len(seen) == 1
    assert compiler.planned[-1] == (CARRIED, CARRIED) or compiler.planned[-1] >= shapes[RUNGS - 1]


@pytest.mark.parametrize("problem", ["guards", "breaks"])
def test_where_no_plan_compiles_the_lowest_one_serves(problem: str) -> None:
    compiler = Compiler()

    def broken(sizes: tuple[int, ...]) -> None:
        if problem == "breaks":
            raise RuntimeError("the compiler breaks")

    compiler.result = broken
    region, published = ladder(compiler, 100)
    with pytest.warns(PlannerWarning, match="no other plan can be made"):
        assert served(region, 500) == (100,)
    assert served(region, 600) == (100,) and len(compiler.planned) == 1 and not published


def test_a_plan_that_another_hook_chose_starts_the_ladder_again() -> None:
    region, _ = ladder(Compiler(), 100)
    served(region, 400)
    region.run_under(running((60,)))  # as after running out of memory
    assert served(region, 70) == (60,)
    assert served(region, 400) >= (400,)


def test_calls_at_the_same_moment_run_their_own_plans() -> None:
    """Both calls have chosen their plan before either of them runs."""
    both_have_chosen, ran = threading.Barrier(2), dict[int, tuple[int, ...]]()

    class Waiting(Hook):
        def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
            both_have_chosen.wait(timeout=10)

    def noting(planned: tuple[int, ...]) -> RunningPlan:
        plan = running(planned)

        def compiled(size: int, x: torch.Tensor) -> torch.Tensor:
            ran[size] = planned
            return x * 2

        return RunningPlan(compiled, plan.report)

    compiler, start = Compiler(), noting((100,))
    compiler.result = noting
    region = CompiledRegion(start, [SizeLadder([("s0", 0)], start), Waiting()], compiler)
    run_at_once(*(partial(region, size, torch.ones(3, requires_grad=True)) for size in (50, 400)))
    assert ran[50] == (100,) and max(ran[400]) >= 400


def test_a_plan_that_another_thread_adds_while_one_is_chosen_drops_none() -> None:
    """The rungs change, and the plan that runs, between two looks at them."""
    start, larger = running((100,)), running((400,))
    hook = SizeLadder([("s0", 0)], start)
    region = CompiledRegion(start, [hook], Compiler())

    class Changing(list[Rung]):
        def __iter__(self) -> Iterator[Rung]:
            hook.rungs = [*hook.rungs[:1], Rung(larger, (480,))]
            region.run_under(larger)
            return super().__iter__()

    hook.rungs = Changing(hook.rungs)
    assert served(region, 50) == (100,)
    assert [rung.running for rung in hook.rungs] == [start, larger]


def test_random_sizes_in_three_threads_are_all_served_within_the_ladder() -> None:
    compiler = Compiler()
    region, published = ladder(compiler, 30)

    def train(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(70):
            region(numbers.randint(2, CARRIED), torch.ones(3, requires_grad=True))

    run_at_once(*(partial(train, seed) for seed in range(3)))
    assert len(compiler.planned) == len(published) < RUNGS
