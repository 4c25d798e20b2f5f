"""The time that a session has, and the parts that it is spent on, the most important first."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import ascii_table

LONGEST_START_S = 60.0


@dataclass
class Part:
    """A part of a session.

    Attributes:
        expected_s: Seconds that it is expected to take.
        is_kept: True if the parts before leave it these seconds, and it does what it can if they are less; another part is left
            out then.
        took_s: None until the part has run.
        note: How it ended.
        is_failed: True if it raised an error.
    """

    name: str
    expected_s: float
    is_kept: bool = False
    took_s: float | None = None
    note: str = "not reached"
    is_failed: bool = False


class Clock:
    """Runs parts one after the other, each inside a deadline.

    Args:
        total_s: For all parts together.
        spent_s: Seconds of them that are over already.
    """

    def __init__(
        self, total_s: float, parts: Sequence[Part], spent_s: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.parts, self._now = list(parts), now
        self._start = now() - spent_s
        self._end = self._start + total_s

    @property
    def spent_s(self) -> float:
        """Seconds since the session began."""
        return self._now() - self._start

    @property
    def expected_s(self) -> float:
        """Seconds that all parts are expected to take."""
        return sum(part.expected_s for part in self.parts)

    def run(self, part: Part, work: Callable[[float], str]) -> None:
        """Do a part if there is time for it; an error becomes a part of its note.

        Args:
            work: Is handed the time, by the same clock, at which it should end; returns a note.
        """
        begin = self._now()
        later = self.parts[self.parts.index(part) + 1 :]
        deadline = self._end - sum(other.expected_s for other in later if other.is_kept)
        left_s = max(0.0, deadline - begin)
        if left_s <= 0 or (left_s < part.expected_s and not part.is_kept):
            part.note = f"left out: it may take {part.expected_s:.0f} s, {left_s:.0f} s are left"
            return
        print(f"\n-- {part.name}: at {self.spent_s:.0f} s, until {deadline - self._start:.0f} s at most", flush=True)
        part.note = "broken off"  # of an interruption, which ends the session
        try:
            part.note = work(deadline)
        except Exception as error:  # the other parts may still work
            traceback.print_exc()
            part.note, part.is_failed = f"failed: {type(error).__name__}: {error}".splitlines()[0], True
        finally:
            part.took_s = round(self._now() - begin, 1)

    def table(self) -> str:
        """A line for each part."""
        rows = [
            (part.name, f"{part.expected_s:.0f}", "-" if part.took_s is None else f"{part.took_s:.0f}", part.note)
            for part in self.parts
        ]
        return ascii_table(("part", "expected s", "took s", "how it ended"), rows)


def seconds_of_this_process() -> float:
    """Seconds since this process began, which is before torch was imported; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return min(LONGEST_START_S, max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s))
    except (OSError, AttributeError, IndexError):
        return 0.0
