"""Choice of the process that lowers a step: this process for a CPU, one of its own with a fake device for a CUDA device."""

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
"""Half-open range of torch versions on which the fake device was tried."""

NOT_WANTED = NotObserved("that was asked for", "leave out --estimate (in Python, estimate) to have its graphs lowered")
INSTALL = "install g++ and the package triton to have its graphs lowered"
NAME_IT = "name the builder as pkg.module:build to have its graphs lowered"


class Lowering(Protocol):
    """Lowers steps, one after the other.

    Attributes:
        is_there: True if it lowers steps; else `result` returns the reason at once.
    """

    is_there: bool

    def begin(self, asked: Asked) -> None:
        """Set the step that is lowered next; a second process starts at once."""

    def result(self) -> Outcome:
        """Wait for the step that was begun last and return its outcome.

        Raises:
            RematError: The builder is invalid, or the model breaks into several graphs.
        """


@contextmanager
def lowered_for(target: Target) -> Iterator[Lowering]:
    """Yields the `Lowering` for a target; the end of the context kills its process, if it has one."""
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
    """Returns the reason why no step can be lowered for a device; None if no obstacle is known."""
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
    """Returns the compute capability as (major, minor); (0, 0) if it is not known."""
    major, _, minor = (figures.compute_capability or "0.0").partition(".")
    return int(major), int(minor)


def fake_device(figures: Device) -> FakeDevice:
    """Returns the device as torch, Inductor and Triton see it; an unknown figure is replaced by that of a small device."""
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
            )  # pickled twice: the process reads the outer pickle before it imports the modules of the inner one
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # a function inside of another, a lambda
            self._failed = NotObserved(f"a second process cannot have the builder ({reason_of(error)})", NAME_IT)

    def send(self, value: object) -> None:
        """Send a value to the process; if the process has ended, nothing is sent, and `result` reports the end."""
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
        except Exception:  # the process has ended, or has written no pickle, for which unpickling may raise any error
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
    """Start the second process, in a session of its own: an interrupt reaches only this process, which kills the second one."""
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
                    with suppress(BrokenPipeError):  # closing flushes bytes that the process has not read
                        pipe.close()  # type: ignore[union-attr]
