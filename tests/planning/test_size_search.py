"""The largest sizes at which a plan keeps its budget, on peaks that are given by a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compile_remat._torch.sizes import Symbol
from compile_remat._util.size_range import Sizes
from compile_remat.planning.size_search import CLOSE, EVALUATIONS, INSIDE, largest_sizes


def found(peak: Callable[..., float], *symbols: tuple[int, int | None]) -> tuple[tuple[int, ...], int]:
    """The largest sizes with a peak of at most 1000 bytes, and how often the peak was evaluated."""
    asked: list[Sizes] = []

    def share(sizes: Sizes) -> float:
        asked.append(sizes)
        return peak(*(n for _, n in sizes)) / 1000

    sizes = largest_sizes([Symbol(f"s{k}", n, most, "") for k, (n, most) in enumerate(symbols)], share)
    return tuple(n for _, n in sizes), len(asked)


@pytest.mark.parametrize(
    "peak",
    [
        lambda n: 100 + 3 * n,
        lambda n: 5 * n,
        lambda n: 10 + n * n / 20,
        lambda n: max(300 + n, 4 * n),
        lambda n: 300 * (1 + n // 64),
    ],
)
def test_the_limit_is_close_and_never_beyond(peak: Callable[..., float]) -> None:
    (size,), evaluations = found(peak, (8, None))
    assert peak(size) <= 1000
    assert peak(size) >= CLOSE * 1000 or peak(int(1.05 * size) + 1) > 1000
    assert evaluations <= EVALUATIONS + len(INSIDE) + 3


def test_guards_of_dynamo_limit_the_search() -> None:
    assert found(lambda n: 1.0, (8, 64))[0] == (64,)
    assert found(lambda n: 1.0, (8, None))[0] > (8 << 10,)


def test_a_plan_above_its_budget_answers_for_its_own_sizes() -> None:
    assert found(lambda n: 2000.0 + n, (8, None))[0] == (8,)


def test_a_peak_that_falls_again_ends_the_box_before_it_rises() -> None:
    (size,), _ = found(lambda n: 1500 if 300 < n < 700 else n, (8, None))
    assert size <= 300


def test_several_sizes_grow_by_the_same_factor() -> None:
    sizes, _ = found(lambda a, b: a * b, (4, None), (10, None))
    assert sizes[0] * sizes[1] <= 1000 and sizes[1] == pytest.approx(2.5 * sizes[0], rel=0.1)
