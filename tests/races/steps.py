"""Random programs under random plans with random tensors on the host, compiled by Inductor to be watched; see `emitted`."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.exc import TorchDynamoException

from compile_remat._torch.offload.copy_check import check_copies
from compile_remat._torch.offload.copy_order import CopiesMisplaced
from compile_remat.compilation.driver import STRICT_OPTIONS, draws_in_turn
from compile_remat.inductor import plan_guard
from compile_remat.inductor.entry import compile_with_partitioner
from tests.correctness.test_offload import MODELS
from tests.fuzz.builder import SMALL
from tests.fuzz.campaign import drawing
from tests.fuzz.models import programs
from tests.fuzz.partitioners import Moving
from tests.fuzz.program import Program
from tests.races.clocks import Event
from tests.races.emitted import Code, watched
from tests.races.watched import Watch

Step = Callable[["Compiled"], None]
Change = Callable[[], AbstractContextManager[Any]]


class Compiled:
    """A module whose compiled code is watched.

    Args:
        module: Called with `inputs`; returns a tensor or several.
        seed: Of the plan; see `Moving`.
        change: Entered while the module is compiled.
        options: Inductor's options; by default those of our backend.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        seed: int,
        change: Change = nullcontext,
        options: Mapping[str, bool] = STRICT_OPTIONS,
    ) -> None:
        def backend(gm: fx.GraphModule, given: Any) -> Callable[..., Any]:
            partitioner = Moving(seed)
            return compile_with_partitioner(gm, given, partitioner, options, guarded=True, is_ordered=draws_in_turn)

        self.watch, self.module, self.inputs = Watch(), module, inputs
        self.codes: list[Code] = []
        self._call: Any = torch.compile(module, backend=backend)
        self._change = change
        torch.compiler.reset()
        self.trace(one_step)  # compiles

    @property
    def is_refused(self) -> bool:
        """True if the product's own check refuses the code."""
        try:
            for code in self.codes:
                check_copies(code.source_code)
        except CopiesMisplaced:
            return True
        return False

    @property
    def moves(self) -> bool:
        """True if a tensor leaves for the host."""
        return any("compile_remat.stash" in code.source_code for code in self.codes)

    def __call__(self) -> list[torch.Tensor]:
        """A forward; returns its outputs that have gradients."""
        returned = self._call(*self.inputs)
        outputs = [returned] if isinstance(returned, torch.Tensor) else returned
        return [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]

    def trace(self, step: Step) -> list[Event]:
        """The events of a step; nothing of the step is left when the trace ends."""
        self.watch.trace = []
        with self._change() if not self.codes else nullcontext(), watched(self.watch) as codes, _unchecked():
            step(self)
            self.module.zero_grad()
        self.codes += codes
        return self.watch.trace


def one_step(compiled: Compiled) -> None:
    """A forward and its backward."""
    _backward(compiled())


def two_forwards(compiled: Compiled) -> None:
    """Two forwards, then the backward of each."""
    for outputs in [compiled(), compiled()]:
        _backward(outputs)


def two_streams(compiled: Compiled) -> None:
    """A step in each of two streams, which share the engines."""
    left = []
    for stream in ("kernels", "other kernels"):
        with compiled.watch.on(stream):
            left.append((stream, compiled()))
    for stream, outputs in left:
        with compiled.watch.on(stream):
            _backward(outputs)


def two_backwards(compiled: Compiled) -> None:
    """A forward, and two backwards of it; only of code that was compiled without donated buffers."""
    outputs = compiled()
    _backward(outputs, retain_graph=True)
    _backward(outputs)


def stopped_forward(compiled: Compiled) -> None:
    """A forward that raises behind the first kernel that follows a stash."""
    _stopped(compiled, "stash")


def stopped_backward(compiled: Compiled) -> None:
    """A backward that raises behind the first kernel that follows a fetch."""
    _stopped(compiled, "fetch")


class Stop(Exception):
    """Raised in the place of a kernel."""


def _stopped(compiled: Compiled, operator: str) -> None:
    def stop(label: str) -> None:
        if seen and label not in ("stash", "release", "fetch", "arrive", "arrived"):
            raise Stop
        if label == operator:
            seen.append(label)

    seen, kept = list[str](), compiled.watch.ran
    compiled.watch.ran = stop  # type: ignore[method-assign]
    try:
        one_step(compiled)
    except Stop as error:
        error.__traceback__ = None
    finally:
        compiled.watch.ran = kept  # type: ignore[method-assign]
    gc.collect()  # frames of the error


def under_hooks(compiled: Compiled) -> None:
    """A step whose saved tensors are copied by hooks, which run on the host."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        compiled.watch.read_by_host(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(copied, lambda tensor: tensor):
        one_step(compiled)


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (one_step, two_forwards, two_streams, stopped_forward, stopped_backward, under_hooks)
}


def _backward(outputs: list[torch.Tensor], *, retain_graph: bool = False) -> None:
    gradients = [torch.ones_like(output) for output in outputs]
    torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Inside, the product takes any code, and nobody warns."""
    with warnings.catch_warnings(), mock.patch.object(plan_guard, "check_copies", lambda source_code: None):
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Case:
    """A module with its inputs, made anew each time, and the seed of its plan."""

    make: Callable[[], tuple[nn.Module, Any]]
    seed: int

    def compiled(self, change: Change = nullcontext, options: Mapping[str, bool] = STRICT_OPTIONS) -> Compiled:
        """The module as Inductor compiles it."""
        torch.manual_seed(0)
        return Compiled(*self.make(), self.seed, change, options)


def cases(number: int, seed: int) -> Iterator[tuple[Case, Compiled]]:
    """Modules of which a tensor leaves for the host: a third models, the others random programs."""
    models, programs = of_models(seed, MODELS), _of_programs(number, seed)
    for place in range(number):
        yield next(programs if place % 3 else models)


def of_models(seed: int, names: Iterable[str]) -> Iterator[tuple[Case, Compiled]]:
    """Models in turn, each time under another plan."""
    for plan in itertools.count(seed):
        for name in names:
            yield from _moving(Case(lambda make=MODELS[name]: _with_inputs(*make()), plan))  # type: ignore[misc]


def _of_programs(number: int, seed: int) -> Iterator[tuple[Case, Compiled]]:
    found: list[Program] = []

    @drawing(programs(sizes=SMALL), 10 * number, seed)
    def look(program: Program) -> None:
        found.append(program)

    look()
    for place, program in enumerate(found):
        yield from _moving(Case(program.module, seed + place))


def _moving(case: Case) -> Iterator[tuple[Case, Compiled]]:
    try:
        compiled = case.compiled()
    except (
        RuntimeError,
        TorchDynamoException,
    ):  # some random programs torch itself refuses: `tests.fuzz` looks at these
        return
    if compiled.moves:
        yield case, compiled


def _with_inputs(module: nn.Module, given: torch.Tensor) -> tuple[nn.Module, tuple[torch.Tensor]]:
    return module, (given,)
