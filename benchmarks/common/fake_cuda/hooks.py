"""The C++ side of the fake device: built with g++ against torch's headers, and registered before torch is imported.

Torch's C++ asks ``CUDAHooksInterface`` about CUDA, and keeps the first answer to "which hooks are there".  A build for CPUs
registers none; the hooks of a CUDA build are registered when its library is loaded, with less priority than ours.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("hooks.cpp")
BUILD = Path(__file__).resolve().parents[3] / "build"


def register() -> None:
    """Let torch's C++ find one CUDA device.

    Raises:
        RuntimeError: Torch was imported before.
        subprocess.CalledProcessError: g++ failed.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the fake device must be installed before torch is imported")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    library = BUILD / f"fake_cuda_hooks-{version('torch')}.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        _build(Path(spec.origin).parent, library)
    if ctypes.CDLL(str(library)).register_device():
        raise RuntimeError("torch has asked for its CUDA hooks already")


def _build(torch_folder: Path, library: Path) -> None:
    """Ten seconds of g++.  Written beside and moved, as several processes may build at once."""
    library.parent.mkdir(exist_ok=True)
    written = library.with_name(f"{library.name}.{os.getpid()}")
    lib = torch_folder / "lib"
    command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", str(SOURCE)]
    command += ["-o", str(written), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    written.replace(library)
