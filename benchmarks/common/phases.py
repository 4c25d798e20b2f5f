"""CPU time of the phases of a call: functions are replaced by timed ones; a nested call counts for the inner phase alone."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

REST = "rest"
"""Name of the time spent in none of the phases."""


@contextmanager
def phases_timed(
    functions: Mapping[str, tuple[Any, str]], raised: Mapping[str, str] = MappingProxyType({})
) -> Iterator[dict[str, float]]:
    """CPU seconds of each phase, and of the rest, of the code inside; complete at the end of the `with` block.

    Args:
        functions: For each phase, where its function is looked up, and under which name.
        raised: The phases that calls count for which end with an error, by the phase of their function.
    """
    spent: dict[str, float] = defaultdict(float)
    running, since = [0.0], time.process_time()  # seconds of each call that runs

    def turn() -> None:
        """Charge what has passed to the call that runs."""
        nonlocal since
        now = time.process_time()
        running[-1] += now - since
        since = now

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            turn()
            running.append(0.0)
            ended = raised.get(phase, phase)
            try:
                result = function(*arguments, **keywords)
                ended = phase
                return result
            finally:
                turn()
                spent[ended] += running.pop()

        return run

    with ExitStack() as stack:
        for phase, (place, name) in functions.items():
            stack.enter_context(mock.patch.object(place, name, timed(phase, getattr(place, name))))
        yield spent
        turn()
        spent[REST] += running.pop()
