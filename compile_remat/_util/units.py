"""Converts amounts of memory and time to and from text: "8GiB" <-> bytes, nanoseconds -> "616 ms".

KB, MB, GB, TB are powers of 1000, KiB, MiB, GiB, TiB powers of 1024, in upper or lower case. Bytes are exact ints: the text is
read as a decimal fraction, never through a float, and a part of a byte is cut off (a budget may shrink, not grow).
"""

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_BINARY = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SIZE = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*([a-z]+)", re.ASCII | re.IGNORECASE)


def parse_bytes(raw: str | int) -> int:
    """Returns the bytes of "8GiB", "8GB", "1.5 MiB" or an int; raises ValueError for any other value or a text without unit."""
    if isinstance(raw, bool) or not isinstance(raw, (str, int)):
        raise ValueError(f"{raw!r} is not a size")
    if isinstance(raw, int):
        nbytes = raw
    else:
        match = _SIZE.fullmatch(raw.strip())
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{raw!r} is not a size.{_suggest_size(raw)}")
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if nbytes < 0:
        raise ValueError(f"{raw!r} is negative")
    return nbytes


def exact_size(nbytes: int) -> str:
    """Returns the shortest text that `parse_bytes` reads back as exactly `nbytes`: "20GiB", or "1234567B"."""
    for scale, unit in _BINARY:
        if nbytes and nbytes % scale == 0:
            return f"{nbytes // scale}{unit}"
    return f"{nbytes}B"


def format_bytes(nbytes: int, unit: str = "") -> str:
    """Returns a rounded text for messages: "512 B", "20.0 GiB"; one decimal, and never "1024.0" of a unit.

    Args:
        unit: The unit to take, see `common_unit`; by default the largest of which there is one.
    """
    if nbytes < 0:
        return "-" + format_bytes(-nbytes, unit)
    if unit and nbytes:
        return f"{nbytes / scale:.1f} {unit}" if (scale := _UNITS[unit.lower()]) > 1 else f"{nbytes} B"
    if nbytes < KIB:
        return f"{nbytes} B"
    for scale, unit in _BINARY:
        if nbytes >= scale - scale // 20480:  # from here on, the next smaller unit would round up to 1024.0
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes / KIB:.1f} KiB"


def in_one_unit(*sizes: int) -> list[str]:
    """Returns amounts of memory for one sentence, all in their `common_unit`."""
    unit = common_unit(*sizes)
    return [format_bytes(nbytes, unit) for nbytes in sizes]


def format_time(time_ns: float) -> str:
    """Returns a text of three digits for messages: "850 ns", "12.3 us", "616 ms", "1.23 s"."""
    if time_ns < 0:
        return "-" + format_time(-time_ns)
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")):
        if time_ns >= scale * 0.9995:
            return f"{_three_digits(time_ns / scale)} {unit}"
    return f"{_three_digits(time_ns)} ns"


def common_unit(*sizes: int | None) -> str:
    """Returns the unit in which all of these bytes can be compared in one line: that of the smallest but zero.

    A larger unit is taken where the largest would have six digits before the point: 20 GiB and 300 KiB are told in MiB.
    """
    known = [nbytes for nbytes in sizes if nbytes]
    units = [(1, "B"), *reversed(_BINARY)]
    own = format_bytes(min(known, default=0)).split()[-1]
    for scale, unit in units[[name for _, name in units].index(own) :]:
        if max(known, default=0) < 100_000 * scale:
            return unit
    return units[-1][1]


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 or value == 0 else f"{value:.2f}"


def _suggest_size(raw: str) -> str:
    """Returns ' Did you mean "8GiB"?' if the text starts with a number and the letter of a scale; else an empty text."""
    match = re.match(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt])", raw, re.ASCII | re.IGNORECASE)
    return f' Did you mean "{match[1]}{match[2].upper()}iB"?' if match else ""
