"""Out of memory: plan again for what was really available, and run the same step again.

A forward that fails is called once more.  A backward that fails starts over: the forward runs again on the same inputs,
under the random state of then, with the new plan, and its backward on the same gradients.  That is right only
while everything that the forward read is still there, unchanged; else the error stays what it was, with a note that says
why.  Nothing is kept alive for this that was not alive anyway, except what is small: copies of what the graph overwrites
and, while a backward runs, its gradients and inputs.
"""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from compile_remat._torch.ambient import read_random_state, write_random_state
from compile_remat._torch.autograd_node import (
    Backward,
    can_be_differentiated,
    compiled_node,
    intercept,
    keeping_version,
    sequence_number,
    written_by,
)
from compile_remat._torch.tensor_arguments import is_plain_tensor
from compile_remat._util.units import MIB, format_bytes
from compile_remat.errors import warn

LOG = logging.getLogger("compile_remat")
Compiled = Callable[..., Any]
T = TypeVar("T")

SMALL_BYTES = MIB
SMALL_SHARE = 256
"""Together they are small up to so many bytes, or up to this part of the plan's peak."""

LESS = 0.85
"""The next plan's peak is at most this part of the one that failed, whatever seems to be free."""

USABLE = 0.95
"""Of the free memory: the rest may be in pieces too small to use."""


class CannotRetry(Exception):
    """Why a step that ran out of memory cannot run again."""


@dataclass(frozen=True)
class Lower:
    """A plan of lower peak, compiled.

    Attributes:
        peak_bytes: Its predicted region peak.
    """

    compiled: Compiled
    peak_bytes: int


@dataclass(frozen=True)
class Before:
    """How things stood when a forward began, by reference where possible.

    Attributes:
        inputs: A weak reference and the version after the forward for each tensor, the value itself for anything else.
        written: Copies of what the forward writes into, by position.
        random: The states of the generators, in no tensor: a plan counts each byte of those.
        problem: Why the forward cannot run again; empty where it can.
    """

    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    written: dict[int, torch.Tensor]
    random: dict[str, bytes]
    problem: str = ""

    def arguments(self) -> list[Any]:
        """What the forward was called with.

        Raises:
            CannotRetry: Some of it is gone, or has another value now.
        """
        if self.problem:
            raise CannotRetry(self.problem)
        found = []
        for k, (value, version) in enumerate(zip(self.inputs, self.versions, strict=True)):
            if not isinstance(value, weakref.ref):
                found.append(value)
            elif k in self.written:
                found.append(self.written[k].clone())
            else:
                tensor = value()
                if tensor is None:
                    raise CannotRetry(f"input {k} of the graph has been freed since the forward")
                if tensor._version != version:
                    raise CannotRetry(f"input {k} of the graph has been changed since the forward")
                found.append(tensor)
        return found

    def held(self, most_bytes: int) -> list[torch.Tensor]:
        """The inputs that are not parameters, alive as long as the list, if all of them take no more than `most_bytes`."""
        found = [value() for value in self.inputs if isinstance(value, weakref.ref)]
        inputs = [t for t in found if t is not None and not isinstance(t, torch.nn.Parameter)]
        return inputs if sum(t.nbytes for t in inputs) <= most_bytes else []


class Retrying:
    """A compiled graph that survives running out of memory.

    Args:
        compiled: What is called.
        lower: Called with the peak of the plan that failed and the bytes to plan for; None where there is no lower plan.
        peak_bytes: The predicted region peak of the plan in `compiled`.
        written: Positions of the arguments that the graph writes into; None where they are not known.
        retries: How often a graph may be planned again in all.
        device: Where it runs.
        available: What can be allocated there now, in bytes; None where that is not known.
        is_lowest: No plan has a lower peak than the one in `compiled`: nothing is kept for another try.
    """

    def __init__(
        self,
        compiled: Compiled,
        lower: Callable[[int, int], Lower | None],
        *,
        peak_bytes: int,
        written: frozenset[int] | None,
        retries: int,
        device: torch.device,
        available: Callable[[], int | None],
        is_lowest: bool = False,
    ) -> None:
        self.compiled = compiled
        self.lower = lower
        self.peak_bytes = peak_bytes
        self.written = written
        self.retries = retries
        self.available = available
        self.is_lowest = is_lowest
        self.device = device
        self.devices = () if device.type == "cpu" else (device,)

    @property
    def small_bytes(self) -> int:
        """What may be kept alive for a second try."""
        if self._refusal():
            return 0
        return max(SMALL_BYTES, self.peak_bytes // SMALL_SHARE)

    def __call__(self, *args: Any) -> Any:
        """Run the graph; the node of a call that can be differentiated remembers how it began."""
        if not can_be_differentiated(args):
            return self.compiled(*args)
        before = self._before(args)
        since = sequence_number()
        outputs: Any
        outputs, failure = attempt(self.compiled, args)
        if failure is not None:
            outputs = self._call_again(args, before, failure)
        node = compiled_node(outputs, since)
        if node is not None:
            if self.written is None:
                self.written = written_by(node, len(args))
            node.remat_before = _after(before, args)
            intercept(node, self._backward)
        return outputs

    # -- the forward --------------------------------------------------------------------------------------------------

    def _before(self, args: Sequence[Any]) -> Before:
        problem, copies = self._refusal(), dict[int, torch.Tensor]()
        if problem:
            return Before((), (), {}, {}, problem)
        if self.written is None:
            problem = "what the graph writes into is not known"
        elif self.written:
            tensors = {k: args[k] for k in sorted(self.written)}
            if any(not is_plain_tensor(t) or t.requires_grad for t in tensors.values()):
                problem = "the graph writes into an input that requires a gradient, or into a tensor of another kind"
            elif sum(t.nbytes for t in tensors.values()) > SMALL_BYTES:
                problem = (
                    f"the graph overwrites inputs of more than {format_bytes(SMALL_BYTES)}, of which no copy is kept"
                )
            else:
                copies = {k: t.detach().clone() for k, t in tensors.items()}
        return Before((), (), copies, _read_random(self.devices), problem)

    def _call_again(self, args: Sequence[Any], before: Before, failure: torch.OutOfMemoryError) -> Any:
        while True:
            try:
                if before.problem:
                    raise CannotRetry(before.problem)
                self._plan_lower(failure)
            except CannotRetry as why:
                raise explained(failure, str(why)) from None
            for k, copy in before.written.items():
                with torch.no_grad(), keeping_version(args[k]):
                    args[k].copy_(copy)
            _write_random(before.random)
            outputs, again = attempt(self.compiled, args)
            if again is None:
                return outputs

    # -- the backward -------------------------------------------------------------------------------------------------

    def _backward(self, node: Any, original: Backward, arguments: tuple[Any, ...]) -> Any:
        before: Before | None = getattr(node, "remat_before", None)
        tangents = _held(arguments, self.small_bytes)
        held = [] if before is None else before.held(self.small_bytes)
        result, failure = attempt(original, (node, *arguments))
        if failure is None:
            return result
        del arguments
        while True:
            try:
                if before is None:
                    raise CannotRetry("the forward of this step was not seen")
                if refusal := self._refusal():
                    raise CannotRetry(refusal)
                inputs = before.arguments()
                held.clear()
                gradients = [_found(t) for t in tangents]
                self._plan_lower(failure)
            except CannotRetry as why:
                raise explained(failure, str(why)) from None
            result, again = attempt(self._whole, (inputs, gradients, before.random))
            del inputs, gradients
            if again is None:
                return result

    def _whole(self, inputs: list[Any], gradients: list[Any], random: dict[str, bytes]) -> Any:
        """Forward and backward, without autograd's engine: nothing is accumulated but by whoever called us."""
        now = _read_random(self.devices)
        _write_random(random)
        try:
            since = sequence_number()
            with torch.enable_grad():
                node = compiled_node(self.compiled(*inputs), since)
        finally:
            _write_random(now)
        if node is None:
            raise RuntimeError("the forward that was run again has no backward")
        inputs.clear()
        return node.apply(*gradients)

    # -- planning again -----------------------------------------------------------------------------------------------

    def _refusal(self) -> str:
        """Why the graph is not planned again; empty where it can be."""
        if self.is_lowest:
            return f"the plan that ran is the lowest, with a predicted peak of {format_bytes(self.peak_bytes)}"
        return "" if self.retries > 0 else "it was planned again as often as oom_retry allows"

    def _plan_lower(self, failure: torch.OutOfMemoryError) -> None:
        """Put a lower plan in the place of the one that failed.

        Raises:
            CannotRetry: There is none, or it was tried too often.
        """
        if refusal := self._refusal():
            raise CannotRetry(refusal)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        available_bytes = self.available()
        target_bytes = int(LESS * self.peak_bytes)
        if available_bytes is not None:
            target_bytes = min(target_bytes, int(USABLE * available_bytes))
        self.retries -= 1
        lower = self.lower(self.peak_bytes, max(1, target_bytes))
        if lower is None:
            self.is_lowest = True
            raise CannotRetry(self._refusal())
        warn(
            f"out of memory with a predicted peak of {format_bytes(self.peak_bytes)}; planned again, now "
            f"{format_bytes(lower.peak_bytes)}. Set memory_budget to have that from the start"
        )
        LOG.info("the error was: %s", failure)
        self.compiled, self.peak_bytes = lower.compiled, lower.peak_bytes


def attempt(function: Callable[..., T], args: Sequence[Any]) -> tuple[T | None, torch.OutOfMemoryError | None]:
    """The result, or the error when memory ran out: then without the tensors that its frames held."""
    try:
        return function(*args), None
    except torch.OutOfMemoryError as error:
        failure = error
    chained: BaseException | None = failure
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    return None, failure


def explained(failure: torch.OutOfMemoryError, why: str) -> torch.OutOfMemoryError:
    """The original error with a note on why the step did not run again."""
    failure.add_note(f"compile_remat: the step was not run again: {why}.")
    return failure


def _read_random(devices: Sequence[torch.device]) -> dict[str, bytes]:
    return {place: state.numpy().tobytes() for place, state in read_random_state(devices).items()}


def _write_random(states: dict[str, bytes]) -> None:
    write_random_state({place: torch.frombuffer(bytearray(s), dtype=torch.uint8) for place, s in states.items()})


def _after(before: Before, args: Sequence[Any]) -> Before:
    inputs = tuple(weakref.ref(a) if isinstance(a, torch.Tensor) else a for a in args)
    versions = tuple(a._version if isinstance(a, torch.Tensor) else 0 for a in args)
    return Before(inputs, versions, before.written, before.random, before.problem)


def _held(arguments: tuple[Any, ...], most_bytes: int) -> list[Any]:
    """The gradients that came in, weakly where they are large: the backward drops them one by one."""
    flat = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments
    small = sum(t.nbytes for t in flat if isinstance(t, torch.Tensor)) <= most_bytes
    return [weakref.ref(t) if isinstance(t, torch.Tensor) and not small else t for t in flat]


def _found(tangent: Any) -> Any:
    value = tangent() if isinstance(tangent, weakref.ref) else tangent
    if value is None and tangent is not None:
        raise CannotRetry("a gradient that came into the backward has been freed")
    return value
