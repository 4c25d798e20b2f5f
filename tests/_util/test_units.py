"""Sizes and times, to and from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_remat._util.units import (
    GIB,
    KIB,
    MIB,
    common_unit,
    exact_size,
    format_bytes,
    format_time,
    in_one_unit,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("500MiB", 500 * 2**20),
        ("500 mib", 500 * 2**20),
        ("  1.5 GiB ", 3 * 2**29),
        (".5KiB", 512),
        ("3kb", 3000),
        ("2TB", 2 * 10**12),
        ("1TiB", 2**40),
        ("7B", 7),
        ("0B", 0),
        ("0.1GiB", 107374182),  # cut off, never rounded up
        ("0.3KB", 300),  # exact, though 0.3 is no float
        (123, 123),
    ],
)
def test_parse_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "bad", ["", "8", "GiB", "8G", "8 gigs", "8GiBs", "1e3MB", "1,5GiB", "-1GiB", -1, True, None, 1.5]
)
def test_parse_bytes_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match=r"is not a size|is negative"):
        parse_bytes(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bad", "meant"), [("8 gigs", "8GiB"), ("1.5g", "1.5GiB"), ("500 megabytes", "500MiB")])
def test_parse_bytes_suggests(bad: str, meant: str) -> None:
    with pytest.raises(ValueError, match="Did you mean") as caught:
        parse_bytes(bad)
    assert f'"{meant}"' in str(caught.value)


@given(st.integers(min_value=0, max_value=2**60))
def test_exact_size_round_trips(nbytes: int) -> None:
    assert parse_bytes(exact_size(nbytes)) == nbytes


def test_exact_size_is_short() -> None:
    assert [exact_size(n) for n in (0, 1000, 1024, 3 << 29, 20 << 30)] == ["0B", "1000B", "1KiB", "1536MiB", "20GiB"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**20 - 52, "1023.9 KiB"),
        (46661632, "44.5 MiB"),
        (20 * 2**30, "20.0 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (-(2**20), "-1.0 MiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=0, max_value=2**49))  # TiB is the largest unit
def test_format_bytes_is_close_and_never_1024(nbytes: int) -> None:
    number, unit = format_bytes(nbytes).split()
    assert float(number) < 1024
    assert abs(parse_bytes(number + unit) - nbytes) <= max(1, nbytes * 0.05)


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((), []),
        ((701_030, 1_402_061, 1_030_656), ["684.6 KiB", "1369.2 KiB", "1006.5 KiB"]),
        ((900 << 20, 20 << 30), ["900.0 MiB", "20480.0 MiB"]),
        ((512, 0, 2048), ["512 B", "0 B", "2048 B"]),
    ],
)
def test_amounts_of_one_sentence_have_one_unit(sizes: tuple[int, ...], texts: list[str]) -> None:
    assert in_one_unit(*sizes) == texts


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0.0 ns"),
        (0.25, "0.25 ns"),
        (850, "850 ns"),
        (999.7, "1.00 us"),
        (12_345, "12.3 us"),
        (616e6, "616 ms"),
        (999.96e6, "1.00 s"),
        (1.234e9, "1.23 s"),
        (90e9, "90.0 s"),
        (-5e6, "-5.00 ms"),
    ],
)
def test_format_time(time_ns: float, text: str) -> None:
    assert format_time(time_ns) == text


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((953_651, 921_600), ["931.3 KiB", "900.0 KiB"]),
        ((MIB, 1000 * KIB), ["1024.0 KiB", "1000.0 KiB"]),
        ((20 * GIB, 300 * KIB), ["20480.0 MiB", "0.3 MiB"]),
        ((8 * GIB, 0, None), ["8.0 GiB", "0 B"]),
        ((700, 2 * KIB), ["700 B", "2048 B"]),
    ],
)
def test_sizes_of_one_line_have_one_unit(sizes: tuple[int | None, ...], texts: list[str]) -> None:
    unit = common_unit(*sizes)
    assert [format_bytes(nbytes, unit) for nbytes in sizes if nbytes is not None] == texts


@given(st.lists(st.integers(min_value=1, max_value=2**49), min_size=1))
def test_a_common_unit_tells_the_smallest_or_keeps_the_largest_short(sizes: list[int]) -> None:
    unit = common_unit(*sizes)
    smallest, largest = (float(format_bytes(each(sizes), unit).split()[0]) for each in (min, max))
    assert largest < 100_000 or unit == "TiB"
    assert smallest >= 1 or largest * 1024 >= 99_000
