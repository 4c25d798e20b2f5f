"""Messages are seen where the level is set, also by a program that has not configured logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging
from compile_remat._util.log_output import show_from
{configure}
for level in ("info", "info"):
    show_from(level)
{configure_later}
logging.getLogger("compile_remat").debug("not this")
logging.getLogger("compile_remat").info("a message")
"""
CONFIGURED = "logging.basicConfig(format='program: %(message)s')"


@pytest.mark.parametrize(
    ("configure", "configure_later", "seen"),
    [
        ("", "", "compile_remat: a message\n"),
        (CONFIGURED, "", "program: a message\n"),
        ("", CONFIGURED, "program: a message\n"),
    ],
    ids=["not configured", "configured", "configured later"],
)
def test_a_message_is_shown_once(configure: str, configure_later: str, seen: str) -> None:
    program = PROGRAM.format(configure=configure, configure_later=configure_later)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", seen)
