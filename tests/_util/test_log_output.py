"""Messages are seen where the level is set, also by a program that has not configured logging."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
import torch

from compile_remat._util.log_output import torch_is_quiet

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


@pytest.mark.parametrize("asked", ["", "dynamo"])
def test_torch_is_quiet_unless_its_log_is_asked_for(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", asked)
    monkeypatch.setattr(sys, "warnoptions", [asked] if asked else [])
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.getEffectiveLevel()
    with warnings.catch_warnings(record=True) as shown:
        with torch_is_quiet():
            assert log.isEnabledFor(logging.ERROR) == bool(asked)
            warnings.warn_explicit("of torch", UserWarning, str(torch.__file__), 1, "torch.nn.functional")
            warnings.warn_explicit("of a model", UserWarning, "model.py", 1, "model")
            warnings.warn_explicit("of a library", UserWarning, "torchao.py", 1, "torchao")
        warnings.warn_explicit("of torch, later", UserWarning, str(torch.__file__), 2, "torch.nn.functional")
    said = [str(warning.message) for warning in shown]
    assert said == ["of torch"] * bool(asked) + ["of a model", "of a library", "of torch, later"]
    assert log.getEffectiveLevel() == before
