"""CPU time of the phases of a call: functions are replaced by timed ones; a nested call counts for the inner phase alone."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

REST = "rest"
"""Name of the time spent in none of the phases."""


@contextmanager
def phases_timed(functions: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """CPU seconds of each phase, and of the rest, of the code inside; complete at the end of the `with` block.

    Args:
        functions: For each phase, where its function is looked up, and under which name.
    """
    spent: dict[str, float] = defaultdict(float)
    running, since = [REST], time.process_time()

    def turn_to() -> None:
        """Charge what has passed to the phase that runs."""
        nonlocal since
        now = time.process_time()
        spent[running[-1]] += now - since
        since = now

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            turn_to()
            running.append(phase)
            try:
                return function(*arguments, **keywords)
            finally:
                turn_to()
                running.pop()

        return run

    with ExitStack() as stack:
        for phase, (place, name) in functions.items():
            stack.enter_context(mock.patch.object(place, name, timed(phase, getattr(place, name))))
        yield spent
        turn_to()
