"""Parts of a session keep to its time: by a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.gpu_quick.clock import Clock, Part, seconds_of_this_process


class Session:
    """A clock of four parts, and how often each of them was begun."""

    def __init__(self, spent_s: float = 0.0) -> None:
        self.now, self.deadlines = 1000.0, list[float]()
        self.compile, self.time = Part("compile", 100, is_kept=True), Part("time", 50, is_kept=True)
        self.again, self.picture = Part("time again", 50), Part("picture", 10, is_kept=True)
        self.clock = Clock(300, [self.compile, self.time, self.again, self.picture], spent_s, lambda: self.now)

    def taking(self, seconds: float) -> Callable[[float], str]:
        def work(deadline: float) -> str:
            self.deadlines.append(deadline)
            self.now += seconds
            return "finished"

        return work


def test_each_part_leaves_the_kept_ones_their_time() -> None:
    session = Session(spent_s=8)
    clock = session.clock
    assert clock.expected_s == 210 and clock.spent_s == 8
    for part, seconds in ((session.compile, 150), (session.time, 60), (session.again, 50), (session.picture, 2)):
        clock.run(part, session.taking(seconds))
    assert [deadline - 992 for deadline in session.deadlines] == [
        240,
        290,
        290,
        300,
    ]  # 50 for the times, 10 for the picture
    assert [part.took_s for part in clock.parts] == [150, 60, 50, 2] and clock.spent_s == 270
    assert {part.note for part in clock.parts} == {"finished"}


def test_what_would_end_too_late_is_not_begun() -> None:
    session = Session()
    session.clock.run(session.compile, session.taking(205))
    session.clock.run(session.time, session.taking(40))
    session.clock.run(session.again, session.taking(1))
    assert session.again.took_s is None and session.again.note == "left out: it may take 50 s, 45 s are left"
    session.now += 46
    session.clock.run(session.picture, session.taking(1))
    assert session.picture.took_s == 1  # 9 s are left, and it is kept
    session.now += 9
    session.clock.run(session.time, session.taking(1))
    assert session.time.note == "left out: it may take 50 s, 0 s are left"
    assert len(session.deadlines) == 3


def test_a_part_that_fails_is_told_and_the_next_one_runs(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session()

    def broken(deadline: float) -> str:
        raise RuntimeError("no such device\nmore")

    session.clock.run(session.compile, broken)
    session.clock.run(session.time, session.taking(1))
    assert session.compile.is_failed and session.compile.note == "failed: RuntimeError: no such device"
    assert not session.time.is_failed and "no such device" in capsys.readouterr().err
    assert [line.split()[-1] for line in session.clock.table().splitlines()[2:]] == [
        "device",
        "finished",
        "reached",
        "reached",
    ]


def test_an_interruption_ends_the_session_and_its_part() -> None:
    session = Session()

    def interrupted(deadline: float) -> str:
        session.now += 7
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.clock.run(session.compile, interrupted)
    assert (session.compile.took_s, session.compile.note) == (7.0, "broken off")


def test_a_process_knows_when_it_began() -> None:
    assert 0.0 <= seconds_of_this_process() <= 60.0
