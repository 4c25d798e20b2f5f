"""Where a step is lowered: in this process for a CPU, in a process of its own with a fake device for a CUDA device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from compile_remat._torch.fake_cuda import hooks
from compile_remat._torch.fake_cuda.device import LIMITS, FakeDevice
from compile_remat._torch.version import torch_version
from compile_remat.cost_models import Device
from compile_remat.errors import RematError
from compile_remat.forecast.lowering.observing import Asked, NotObserved, Outcome, observe, reason_of
from compile_remat.forecast.target_step import Target

MODULE = "compile_remat.forecast.lowering.device_process"

TORCH = ((2, 11), (2, 14))
"""Half-open range of torch versions that the fake device was tried on."""

NOT_WANTED = NotObserved("that was asked for", "leave out --estimate (in Python, estimate) to have its graphs lowered")
INSTALL = "install g++ and the package triton to have its graphs lowered"
NAME_IT = "name the builder as pkg.module:build to have its graphs lowered"


class Lowering(Protocol):
    """Lowers steps, one after the other.

    Attributes:
        is_there: Whether it lowers any; else `result` says why not, at once.
    """

    is_there: bool

    def begin(self, asked: Asked) -> None:
        """Say which step comes next."""

    def result(self) -> Outcome:
        """Wait for it.

        Raises:
            RematError: The builder is off, or the model breaks into several graphs.
        """


@contextmanager
def lowered_for(target: Target) -> Iterator[Lowering]:
    """Yields the `Lowering` for a target; its process, if it has one, is killed when the context ends."""
    figures = target.figures()
    reason = NOT_WANTED if target.estimate else obstacle_to(figures)
    if reason is not None:
        yield _Nothing(reason)
    elif figures.name == "cpu":
        yield _Here()
    else:
        with _started(fake_device(figures)) as process:
            yield process


def obstacle_to(figures: Device) -> NotObserved | None:
    """Why no step can be lowered for a device; None where nothing is known to stand in the way."""
    if figures.name == "cpu":
        return None
    if figures.compute_capability is None:
        known = "compute_capability in its file says which"
        return NotObserved(f"{figures.name} is no CUDA device of a known compute capability", known)
    if capability_of(figures) not in LIMITS:
        return NotObserved(f"Inductor's code for compute capability {figures.compute_capability} is not known")
    if not TORCH[0] <= torch_version() < TORCH[1]:
        (first, low), (last, end) = TORCH
        return NotObserved(f"that needs torch {first}.{low} to {last}.{end - 1}")
    missing = hooks.obstacle()
    return NotObserved(missing, INSTALL) if missing else None


def capability_of(figures: Device) -> tuple[int, int]:
    """The compute capability as two numbers."""
    major, _, minor = (figures.compute_capability or "0.0").partition(".")
    return int(major), int(minor)


def fake_device(figures: Device) -> FakeDevice:
    """The device as torch, Inductor and Triton will see it; a figure that is not known is that of a small device."""
    rates = dict(figures.flops_per_s)
    half = rates.get("bfloat16", rates.get("float16", rates["float32"]))
    return FakeDevice(
        figures.name,
        capability_of(figures),
        figures.memory_bytes or 16 << 30,
        figures.multiprocessors or 40,
        figures.l2_bytes or 4 << 20,
        figures.bandwidth_bytes_per_s / 1e9,
        half / 1e12,
        rates["float32"] / 1e12,
    )


class _Nothing:
    is_there = False

    def __init__(self, reason: NotObserved) -> None:
        self._reason = reason

    def begin(self, asked: Asked) -> None:
        pass

    def result(self) -> Outcome:
        return self._reason


class _Here:
    is_there = True
    _asked: Asked

    def begin(self, asked: Asked) -> None:
        self._asked = asked

    def result(self) -> Outcome:
        return observe(self._asked)


class _Elsewhere:
    is_there = True

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self._process, self._errors = process, errors
        self._failed: NotObserved | None = None

    def begin(self, asked: Asked) -> None:
        try:
            self.send(
                pickle.dumps(asked)
            )  # twice: the process reads that there is something before it imports what it is
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # a function inside of another, a lambda
            self._failed = NotObserved(f"a second process cannot have the builder ({reason_of(error)})", NAME_IT)

    def send(self, value: object) -> None:
        """Send what the process waits for; one that has ended gets nothing, which `result` says."""
        sent, pipe = pickle.dumps(value), self._process.stdin
        assert pipe is not None
        try:
            pipe.write(sent)
            pipe.flush()
        except BrokenPipeError:
            pass

    def result(self) -> Outcome:
        if self._failed is not None:
            return self._failed
        assert self._process.stdout is not None
        try:
            found: Outcome | RematError = pickle.load(self._process.stdout)
        except Exception:  # it has ended, or something else than an answer was written: unpickling raises anything then
            self._process.kill()
            return self._ended()
        if isinstance(found, RematError) and not isinstance(found, Outcome):
            raise found
        return found

    def _ended(self) -> NotObserved:
        status = self._process.wait()
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "without a word"
        return NotObserved(f"the process with the fake device ended with status {status}: {last}")


@contextmanager
def _started(device: FakeDevice) -> Iterator[_Elsewhere]:
    """Start the process, in a session of its own: an interrupt goes to this process alone, which kills it."""
    with tempfile.TemporaryDirectory(prefix="compile-remat-") as folder:
        errors = Path(folder, "errors.txt")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
            "TRITON_CACHE_DIR": str(Path(folder, "triton")),
        }
        with errors.open("wb") as written:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                env=environment,
                start_new_session=True,
            )
            try:
                lowering = _Elsewhere(process, errors)
                lowering.send(device)
                yield lowering
            finally:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with suppress(BrokenPipeError):  # what it has not read
                        pipe.close()  # type: ignore[union-attr]
