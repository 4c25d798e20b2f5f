"""Ratio intervals and step times by synthetic clocks."""

from collections.abc import Callable

import pytest

from benchmarks.common.timing import interleaved_ratio, step_times_ns


class _Clock:
    """A clock that only the timed functions move."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def takes(self, *times_ns: int) -> Callable[[], None]:
        """A function whose calls take these times in turn."""
        calls = iter(range(1 << 30))

        def run() -> None:
            self.now_ns += times_ns[next(calls) % len(times_ns)]

        return run


def test_ratio_of_equal_functions_contains_one() -> None:
    clock = _Clock()
    a, b = clock.takes(100, 104, 97, 101, 99), clock.takes(101, 98, 103)
    ratio = interleaved_ratio(a, b, pairs=30, device="cpu", seed=0, clock=clock)
    assert ratio.low <= 1.0 <= ratio.high
    assert ratio.pairs == 30


def test_ratio_is_b_over_a_and_deterministic() -> None:
    def measured() -> object:
        clock = _Clock()
        return interleaved_ratio(clock.takes(100, 110), clock.takes(150, 160, 170), 30, "cpu", seed=3, clock=clock)

    first = measured()
    assert first == measured()
    clock = _Clock()
    exact = interleaved_ratio(clock.takes(100), clock.takes(150), 5, "cpu", seed=0, clock=clock)
    assert (exact.low, exact.median, exact.high) == (1.5, 1.5, 1.5)
    assert (exact.median_a_ns, exact.median_b_ns) == (100, 150)
    assert str(exact) == "1.500 [1.500, 1.500]"


def test_both_orders_occur() -> None:
    order: list[str] = []
    interleaved_ratio(lambda: order.append("a"), lambda: order.append("b"), 20, "cpu", seed=0)
    firsts = set(order[::2])
    assert firsts == {"a", "b"}
    assert order.count("a") == order.count("b") == 20


def test_no_pairs_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleaved_ratio(lambda: None, lambda: None, pairs=0, device="cpu", seed=0)


def test_step_times_by_the_given_clock() -> None:
    clock = _Clock()
    assert step_times_ns(clock.takes(5, 7), 3, "cpu", clock) == [5, 7, 5]
