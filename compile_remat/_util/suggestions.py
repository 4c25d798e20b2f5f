"""The nearest valid name to a mistyped one, for error messages."""

import difflib
from collections.abc import Iterable


def closest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """The valid name most like `name`, or "" where none is near enough to be worth suggesting.

    >>> closest("memory_bugdet", ["memory_budget", "mode"])
    'memory_budget'
    """
    by_folded = {_folded(v): v for v in sorted(valid)}
    matches = difflib.get_close_matches(_folded(name), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else ""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """' Did you mean "x"?' with its leading space, or "": ready to stand behind a sentence."""
    near = closest(name, valid)
    return f' Did you mean "{near}"?' if near else ""


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")
