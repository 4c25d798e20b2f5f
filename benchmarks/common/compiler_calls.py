"""Files that a process hands to the C++ compiler, recorded by a compiler that logs its arguments."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".cpp", ".h")
COMPILER = """\
#!/bin/sh
printf '%s\\n' "$*" >> {log}
exec {compiler} "$@"
"""


def run_counted(command: Sequence[str], folder: Path) -> tuple[str, set[str]]:
    """Returns the output of a command, and the files that the C++ compiler was called with.

    Args:
        folder: Holds torch's compile caches; the next command with the same folder finds them filled.
    """
    log = folder / "calls"
    log.write_text("")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    compiler = logging_compiler(folder, log, os.environ.get("CXX", "g++"))
    environment = {**os.environ, **caches, "CXX": str(compiler)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return output, files_of(log)


def logging_compiler(folder: Path, log: Path, compiler: str) -> Path:
    """A command that calls a compiler, and writes a line with its arguments to `log` each time."""
    script = folder / "g++"
    script.write_text(COMPILER.format(log=shlex.quote(str(log)), compiler=shlex.quote(compiler)))
    script.chmod(0o755)
    return script


def files_of(log: Path) -> set[str]:
    """The files that the compiler was called with."""
    return {word for line in log.read_text().splitlines() for word in line.split() if word.endswith(SUFFIXES)}
