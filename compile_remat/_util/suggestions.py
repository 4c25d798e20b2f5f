"""Suggests the valid name nearest to a mistyped one, for error messages."""

import difflib
from collections.abc import Iterable, Sequence

_FEWEST_LETTERS, _MOST_NAMES = 3, 3


def closest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns the valid name most like `name`, or "" if none is near enough to suggest.

    >>> closest("memory_bugdet", ["memory_budget", "mode"])
    'memory_budget'
    """
    by_folded = {_folded(v): v for v in sorted(valid)}
    matches = difflib.get_close_matches(_folded(name), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else ""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns ' Did you mean "x"?' with a leading space, to append to a sentence, or "" if there is no suggestion.

    >>> did_you_mean("h100", ["h100-sxm", "h200", "v100", "h100-pcie"])
    ' Did you mean "h100-pcie" or "h100-sxm"?'
    """
    valid = sorted(valid)
    near = _begun(name, valid) or list(filter(None, [closest(name, valid)]))
    names = " or ".join(f'"{each}"' for each in near)
    return f" Did you mean {names}?" if near else ""


def _begun(name: str, valid: Sequence[str]) -> list[str]:
    """Returns the valid names that begin with `name`, if they are few: h100 -> h100-pcie, h100-sxm."""
    begun = [each for each in valid if _folded(each).startswith(_folded(name))]
    return begun if len(_folded(name)) >= _FEWEST_LETTERS and len(begun) <= _MOST_NAMES else []


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")
