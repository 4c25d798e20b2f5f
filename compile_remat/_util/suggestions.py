"""Suggests the valid name nearest to a mistyped one, for error messages."""

import difflib
from collections.abc import Iterable


def closest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns the valid name most like `name`, or "" if none is near enough to suggest.

    >>> closest("memory_bugdet", ["memory_budget", "mode"])
    'memory_budget'
    """
    by_folded = {_folded(v): v for v in sorted(valid)}
    matches = difflib.get_close_matches(_folded(name), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else ""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns ' Did you mean "x"?' with a leading space, to append to a sentence, or "" if there is no suggestion."""
    near = closest(name, valid)
    return f' Did you mean "{near}"?' if near else ""


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")
