"""Functions that run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_at_once(*functions: Callable[[], object]) -> None:
    """Run each function in a thread of its own, and wait for all; raises the first error of any."""
    failures: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
