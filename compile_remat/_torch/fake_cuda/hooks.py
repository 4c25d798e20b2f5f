"""The C++ side of the fake device: built with g++ against torch's headers, and registered before torch is imported.

Torch's C++ reads CUDA's state through ``CUDAHooksInterface``, and keeps the hooks that it finds first.  A build for CPUs
registers none; the hooks of a CUDA build are registered when its library is loaded, with a lower priority than these.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

COMPILER = "g++"
SOURCE = Path(__file__).with_name("hooks.cpp")


def obstacle() -> str:
    """Returns the reason why this Python cannot install the fake device; empty if no obstacle is known."""
    if shutil.which(COMPILER) is None:
        return f"{COMPILER} is not installed"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def library() -> Path:
    """Returns the path of the built hooks, below ``$XDG_CACHE_HOME`` or ``~/.cache``: one file per torch version and source."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return cache / "compile-remat" / f"fake_cuda_hooks-{version('torch')}-{digest}.so"


def register() -> None:
    """Register hooks by which torch's C++ finds one CUDA device.

    Raises:
        RuntimeError: Torch is imported already, or g++ failed.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake device must be installed before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    built = library()
    if not built.exists():
        _build(Path(spec.origin).parent, built)
    if ctypes.CDLL(str(built)).register_device():
        raise RuntimeError("torch has asked for its CUDA hooks already")


def _build(torch_folder: Path, built: Path) -> None:
    """Build the hooks in about ten seconds.  The file is written beside its place and renamed, as several processes may build."""
    built.parent.mkdir(parents=True, exist_ok=True)
    written = built.with_name(f"{built.name}.{os.getpid()}")
    lib = torch_folder / "lib"
    command = [COMPILER, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
    command += ["-o", str(written), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
        raise RuntimeError(f"{COMPILER} cannot build the hooks of the fake device: {first.strip()}")
    written.replace(built)
