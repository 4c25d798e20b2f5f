"""The command in a process of its own whose output is no terminal: pipes, files, narrow ones, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STACK = "tests.forecast.mesh.models:stack"
ON = ["--device", "h100-sxm"]
COMMANDS = {
    "plan": ["plan", STACK, *ON, "--no-largest-batch"],
    "explain": ["explain", STACK, *ON],
    "pareto": ["pareto", STACK, *ON, "--points", "3"],
    "doctor": ["doctor"],
}
HEADS = {
    "plan": f"{STACK} (batch 512; as built) on h100-sxm",
    "explain": "",
    "pareto": f"{STACK} on h100-sxm",
    "doctor": "",
}
TIMEOUT_S = 300.0


def started(arguments: Sequence[str], **given: object) -> subprocess.Popen[str]:
    """The command with no colours, in narrow lines, and with interrupts, which a job in the background of a shell ignores."""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "40", "PYTHONPATH": str(ROOT)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **given}
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    program = [sys.executable, "-m", "compile_remat", *arguments]
    return subprocess.Popen(program, text=True, env=environment, cwd=ROOT, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("command", COMMANDS)
def test_text_for_programs_has_no_colours_and_no_line_is_cut(command: str) -> None:
    process = started(COMMANDS[command])
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in ((0, 1) if command == "doctor" else (0,)), err  # doctor: 1 where something is missing
    assert "\x1b" not in out + err and "\r" not in out + err and "Traceback" not in err
    assert "…" not in out and "..." not in out
    assert out.startswith(HEADS[command]) and out.endswith("\n") and out.count("\n") > 3
    if command == "doctor":
        assert err == ""
    else:
        assert err.splitlines()[0] == "loading torch"
        assert f"tracing {STACK}" in err.splitlines()


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_pipe_that_nobody_reads_any_more_ends_it_quietly(command: str) -> None:
    """For example ``| head -1``, which may end before any output is written."""
    reading, writing = os.pipe()
    os.close(reading)
    process = started(COMMANDS[command], stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 141
    assert "Traceback" not in err and "Broken" not in err and "Exception ignored" not in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">&- 2>&-", 0, ""),
        (">/dev/full", 2, "compile-remat devices: cannot write: No space left on device\n"),
        (">/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_closed_and_full_outputs_end_it_quietly(redirected: str, status: int, said: str, unbuffered: str) -> None:
    shell = f"{sys.executable} -m compile_remat devices {redirected}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert (done.returncode, done.stderr) == (status, said)
    assert bool(done.stdout) == (redirected == "2>&-")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["", "plan "])
def test_help_that_cannot_be_written_is_an_error(command: str, unbuffered: str) -> None:
    shell = f"{sys.executable} -m compile_remat {command}--help >/dev/full"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert (done.returncode, done.stderr) == (2, "compile-remat: cannot write: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["unett", *ON], 'Did you mean "unet"?'),
        (["llama", *ON], 'Did you mean "llama-2-70b" or "llama-2-7b"?'),
        (["unet", "--device", "h100"], 'Did you mean "h100-pcie" or "h100-sxm"?'),
        (["tests/planned_models.py:llama", *ON], 'Did you mean "tests.planned_models:llama"?'),
        (["nosuchmodule:build", *ON], "there is no module nosuchmodule."),
        (["unet", *ON, "--batch", "0"], "batch = 0: must be at least 1."),
        (["unet", *ON, "--seq", "-3"], "seq = -3: must be at least 1."),
        (["unet", *ON, "--budget=-5GiB"], "'-5GiB' is negative"),
        (["unet", *ON, "--budget", "-5GiB"], "'-5GiB' is negative"),
        (["unet", *ON, "--reserve", "-5%"], "'-5%'"),
        (
            ["unet", *ON, "--html", "/no/such/p\u00e4ge.html"],
            "p\u00e4ge.html cannot be written (there is no folder /no/such)",
        ),
        (["unet", "--device"], "argument --device: expected one argument"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain", "pareto"])
def test_a_mistyped_argument_is_one_line_without_torch(command: str, arguments: list[str], said: str) -> None:
    program = (
        "import sys; from compile_remat.cli import main\n"
        "try: status = main()\n"
        "except SystemExit as stopped: status = stopped.code\n"
        "print(status, [name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
    )
    given = [sys.executable, "-c", program, command, *arguments]
    done = subprocess.run(given, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.stdout == "2 []\n"
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_head_of_both_streams_ends_it_quietly() -> None:
    """Progress is written behind the line that ``head`` has read."""
    shell = f'{sys.executable} -m compile_remat {" ".join(COMMANDS["plan"])} 2>&1 | head -1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.stdout.splitlines() == ["loading torch", "141"] and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (COMMANDS["explain"], "loading torch"),
        (["plan", STACK, *ON], f"tracing {STACK}"),  # a second process traces another batch
    ],
    ids=["loading", "two processes"],
)
def test_an_interrupt_ends_all_its_processes_in_one_line(arguments: list[str], line: str) -> None:
    """A terminal sends Ctrl-C to the whole process group.

    A shell sees status 130 also where the process ends by the signal.  Python does that, whoever caught the interrupt, if it hit
    a string in ``exec`` (``run_eval_code_obj`` in ``pythonrun.c``), as named tuples are made of while torch is imported.
    """
    process = started(arguments, start_new_session=True)
    assert process.stderr is not None
    for text in process.stderr:
        if text == f"{line}\n":
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (130, -signal.SIGINT)
    assert (err, out) == (f"compile-remat {arguments[0]}: interrupted\n", "")
    deadline = time.monotonic() + TIMEOUT_S
    while _is_there(process.pid):  # multiprocessing has a process that ends a moment later
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
