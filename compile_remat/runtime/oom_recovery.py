"""Recovers from out of memory and from failed copies to the host: plans again, and runs the same step again.

After out of memory, the plan is one for the memory that was really available; after a copy that failed, or host memory that was not
to be had, it moves nothing to the host, and no plan of this process does from then on.  A failed forward is called again.  For a
failed backward, the forward runs again on the same inputs, under its random state and the new plan, and then its backward on the
same incoming gradients.  This gives the right gradients only while every tensor that the forward read still exists, unchanged;
otherwise the original error is raised with a note that says why.  Recovery extends the lifetime only of small tensors: copies of
the inputs that the graph overwrites and, while a backward runs, its incoming gradients and its inputs.
"""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from compile_remat._torch.ambient import read_random_state, write_random_state
from compile_remat._torch.autograd_node import (
    Backward,
    compiled_node,
    edges_of,
    keeping_version,
    sequence_number,
    written_by,
)
from compile_remat._torch.offload.streams import HostCopyError
from compile_remat._torch.sizes import in_blocks
from compile_remat._torch.tensor_arguments import is_plain_tensor, version_of
from compile_remat._util.units import MIB, exact_size, format_bytes, in_one_unit
from compile_remat._util.user_warnings import PREFIX
from compile_remat.errors import warn
from compile_remat.planning.request import Fit, FitBelow, Request
from compile_remat.planning.settings import stop_offload
from compile_remat.ranks.board import note_failure
from compile_remat.report import joined
from compile_remat.runtime.region import CallInFlight, Compiled, CompiledRegion, Hook, RunningPlan
from compile_remat.runtime.states import CallEvent, PlanState

LOG = logging.getLogger("compile_remat")
T = TypeVar("T")
Failure = torch.OutOfMemoryError | HostCopyError

SMALL_BYTES = MIB
SMALL_SHARE = 256
"""Tensors are small if together they have at most `SMALL_BYTES`, or at most 1 / `SMALL_SHARE` of the plan's peak."""

LESS = 0.85
"""The target of the next plan is at most this share of the failed plan's peak, however many bytes seem to be free."""

USABLE = 0.95
"""Share of the free memory that counts: the rest may be in pieces too small to use."""


class CannotRetry(Exception):
    """Carries the reason why a step that failed cannot run again."""


@dataclass(frozen=True)
class Start:
    """The inputs and the random state of a forward, by reference where possible.

    Attributes:
        inputs: A weak reference for each tensor, the value itself for any other argument.
        versions: The version of each argument after the forward; None if it has none.
        written: Copies of the inputs that the forward overwrites, by position.
        random: The states of the generators, as bytes and not as tensors, because a plan counts the bytes of tensors.
        problem: The reason why the forward cannot run again; empty if it can.
    """

    inputs: tuple[Any, ...] = ()
    versions: tuple[int | None, ...] = ()
    written: dict[int, torch.Tensor] = field(default_factory=dict)
    random: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""

    def arguments(self) -> list[Any]:
        """Returns the arguments of the forward.

        Raises:
            CannotRetry: The forward cannot run again, or an argument was freed or changed since.
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
                if version_of(tensor) != version:
                    raise CannotRetry(f"input {k} of the graph has been changed since the forward")
                found.append(tensor)
        return found

    def kept(self, most_bytes: int) -> list[torch.Tensor]:
        """Returns strong references to the inputs that are not parameters; an empty list if they exceed `most_bytes` together."""
        found = [value() for value in self.inputs if isinstance(value, weakref.ref)]
        inputs = [t for t in found if t is not None and not isinstance(t, torch.nn.Parameter)]
        return inputs if sum(t.nbytes for t in inputs) <= most_bytes else []


class OomRecovery(Hook):
    """The hook that runs a step again after it ran out of memory, or after a copy between device and host failed.

    Args:
        retries: Times that the region may be planned again, in all its calls together.
        device: The device of the region.
        available: Returns the bytes that can be allocated on the device now; None if unknown.
        written: Positions of the arguments that the graph writes into; None if unknown.
        limit_bytes: The budget if it is a number of bytes; the plan's peak and the copies together stay inside of it.
        is_minimum: True if a plan made without peers is the plan of the minimum peak.
        communicates: True if the graph waits for other ranks, which would not run it again.
    """

    def __init__(
        self,
        *,
        retries: int,
        device: torch.device,
        available: Callable[[], int | None],
        written: frozenset[int] | None,
        limit_bytes: int | None = None,
        is_minimum: bool = False,
        communicates: bool = False,
    ) -> None:
        self.retries, self.device, self.available = retries, device, available
        self.written, self.is_minimum, self.communicates = written, is_minimum, communicates
        self.limit_bytes = limit_bytes
        self.lowest_bytes: int | None = None  # peak of the lowest plan, once known
        self.random_devices = () if device.type == "cpu" else (device,)

    def small_bytes(self, region: CompiledRegion) -> int:
        """Returns the bytes of tensors that may be kept alive for a second try; 0 if there will be none."""
        return 0 if self._refusal(region) else max(SMALL_BYTES, region.running.plan.peak_bytes // SMALL_SHARE)

    def before_forward(self, call: CallInFlight, args: Sequence[Any]) -> None:
        """Copy the inputs that the forward overwrites and the random state, or note the reason why it could not run again."""
        region = _region_of(call)
        problem = self._refusal(region) or self._problem_of(args, self._room_bytes(region))
        call.notes[self] = Start(problem=problem) if problem else self._start(args)

    def _room_bytes(self, region: CompiledRegion) -> int:
        """Returns the bytes that copies may take beside the plan's peak."""
        report = region.running.report
        peak_bytes = report.scheduled_peak_bytes or report.predicted_peak_bytes
        if self.limit_bytes is None or peak_bytes is None:
            return SMALL_BYTES
        return min(SMALL_BYTES, max(0, self.limit_bytes - peak_bytes))

    def _problem_of(self, args: Sequence[Any], room_bytes: int) -> str:
        """Returns the reason why the forward could not run again on these arguments; empty if it could."""
        if self.written is None:
            return "the inputs that the graph overwrites are not known"
        tensors = [args[k] for k in self.written]
        if any(not is_plain_tensor(t) or t.requires_grad for t in tensors):
            return "the graph writes into an input that requires a gradient, or into no plain tensor"
        nbytes = sum(in_blocks(t.nbytes, t.device.type) for t in tensors)
        if nbytes > SMALL_BYTES:
            return f"the graph overwrites inputs of more than {format_bytes(SMALL_BYTES)}, of which no copy is kept"
        if nbytes > room_bytes:
            return f"the budget has no room for copies of the inputs that the graph overwrites ({format_bytes(nbytes)})"
        return ""

    def _start(self, args: Sequence[Any]) -> Start:
        copies = {k: args[k].detach().clone() for k in sorted(self.written or ())}
        return Start(written=copies, random=_read_random(self.random_devices))

    def forward(self, call: CallInFlight, run: Compiled, *args: Any) -> Any:
        """Run the forward; returns its outputs, under another plan if it fails."""
        outputs, failure = attempt(run, args)
        start: Start = call.notes[self]
        while failure is not None:
            try:
                if start.problem:
                    raise CannotRetry(start.problem)
                self._plan_again(_region_of(call), failure)
            except CannotRetry as why:
                raise explained(failure, str(why)) from None
            call.move(CallEvent.RETRIED)
            call.running = _region_of(call).running
            for k, copy in start.written.items():
                with torch.no_grad(), keeping_version(args[k]):
                    args[k].copy_(copy)
            _write_random(start.random)
            outputs, failure = attempt(run, args)
        return outputs

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """Keep weak references to the inputs, for a backward that fails."""
        if self.written is None:
            self.written = written_by(node, len(args))
        start: Start = call.notes[self]
        inputs = tuple(weakref.ref(a) if isinstance(a, torch.Tensor) else a for a in args)
        call.notes[self] = replace(start, inputs=inputs, versions=tuple(map(version_of, args)))

    def backward(self, call: CallInFlight, run: Backward, *arguments: Any) -> Any:
        """Run the backward; returns its gradients.  If it fails, the whole step runs again under another plan."""
        region, start = _region_of(call), call.notes.get(self)
        tangents = _kept(arguments, self.small_bytes(region))
        kept = [] if start is None else start.kept(self.small_bytes(region))
        result, failure = attempt(run, arguments)
        del arguments
        while failure is not None:
            try:
                if start is None:
                    raise CannotRetry("the forward of this step was not seen")
                if call.num_delivered:
                    raise CannotRetry("gradients have left the backward already (gradients = early)")
                if refusal := self._refusal(region):
                    raise CannotRetry(refusal)
                inputs = start.arguments()
                kept.clear()
                gradients = [_found(t) for t in tangents]
                self._plan_again(region, failure)
            except CannotRetry as why:
                raise explained(failure, str(why)) from None
            call.move(CallEvent.RETRIED)
            result, failure = attempt(self._whole_step, (region, inputs, gradients, start.random))
            del inputs, gradients
        return result

    def _whole_step(
        self, region: CompiledRegion, inputs: list[Any], gradients: list[Any], random: dict[str, bytes]
    ) -> Any:
        """Run forward and backward without autograd's engine, so that only the caller accumulates the gradients; returns these."""
        now = _read_random(self.random_devices)
        _write_random(random)
        try:
            since = sequence_number()
            with torch.enable_grad():
                outputs = region.running.compiled(*inputs)
                node, edges = compiled_node(outputs, since), edges_of(outputs)
                del outputs
        finally:
            _write_random(now)
        if node is None:
            raise RuntimeError("the forward that was run again has no backward")
        inputs.clear()
        result = node.apply(*gradients)
        del edges
        return result

    def _refusal(self, region: CompiledRegion) -> str:
        """Returns the reason why the region is not planned again, however it fails; empty if it can be."""
        if self.communicates:
            return "the graph communicates with other ranks, which do not run it again"
        return "" if region.running.plan.offloaded else self._why_not_lower(region)

    def _why_not_lower(self, region: CompiledRegion) -> str:
        peak_bytes = region.running.plan.peak_bytes
        if peak_bytes == self.lowest_bytes or (self.is_minimum and region.state is PlanState.EXCLUSIVE):
            return f"the plan that ran is the lowest, with a predicted peak of {format_bytes(peak_bytes)}"
        return "" if self.retries > 0 else "the graph was planned again as often as oom_retry allows"

    def _plan_again(self, region: CompiledRegion, failure: Failure) -> None:
        """Replace the plan that failed.

        Raises:
            CannotRetry: There is no such plan, planning fails, or the region was planned again too often.
        """
        if isinstance(failure, HostCopyError):
            self._plan_without_host(region, failure)
        else:
            self._plan_lower(region, failure)

    def _plan_without_host(self, region: CompiledRegion, failure: HostCopyError) -> None:
        """Replace the plan by one that moves nothing, and let no later plan of the process move anything."""
        if refusal := self._refusal(region):
            raise CannotRetry(refusal)
        stop_offload()
        kept = _planned(region, Fit())
        if kept is None or kept.plan.offloaded:
            raise CannotRetry("no plan without offload compiles")
        _publish(region, kept, "planned again without offload, as a copy failed")
        warn(
            f"{str(failure).removeprefix(PREFIX)}. The step is repeated under a plan that moves nothing to the host, with a "
            f"predicted peak of {format_bytes(kept.plan.peak_bytes)}; offload is off from now on"
        )
        region.run_under(kept)

    def _plan_lower(self, region: CompiledRegion, failure: torch.OutOfMemoryError) -> None:
        """Replace the plan that ran out of memory by a lower one."""
        if refusal := self._refusal(region) or self._why_not_lower(region):
            raise CannotRetry(refusal)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        peak_bytes, available_bytes = region.running.plan.peak_bytes, self.available()
        target_bytes = int(LESS * peak_bytes)
        if available_bytes is not None:
            target_bytes = min(target_bytes, int(USABLE * available_bytes))
        self.retries -= 1
        lower = _planned(region, FitBelow(max(1, target_bytes)))
        if lower is None or lower.plan.peak_bytes >= peak_bytes:
            self.lowest_bytes = peak_bytes
            raise CannotRetry(self._why_not_lower(region))
        _publish(
            region,
            lower,
            f"planned again after running out of memory with a predicted peak of {format_bytes(peak_bytes)}",
        )
        before, now = in_one_unit(peak_bytes, lower.plan.peak_bytes)
        enough = exact_size(-(-lower.plan.peak_bytes // MIB) * MIB)
        warn(
            f"out of memory with a predicted peak of {before}; planned again with one of {now}, and the step is repeated. "
            f'Set memory_budget to "{enough}" to have that from the start'
        )
        LOG.info("the error was: %s", failure)
        region.run_under(lower)
        region.menu = tuple(o for o in region.menu if o.peak_bytes < peak_bytes) or region.menu


def _planned(region: CompiledRegion, request: Request) -> RunningPlan | None:
    """Returns another plan of the region, compiled; raises CannotRetry if that fails."""
    try:
        return region.recompile(request)
    except Exception as error:
        LOG.warning("planning again after a step failed", exc_info=True)
        raise CannotRetry(f"planning again failed ({type(error).__name__}: {error})") from None


def _publish(region: CompiledRegion, running: RunningPlan, text: str) -> None:
    region.publish(replace(running.report, message=joined(running.report.message, text)))


def _region_of(call: CallInFlight) -> CompiledRegion:
    assert call.region is not None, "a region lives while its calls run"
    return call.region


def attempt(function: Callable[..., T], args: Sequence[Any]) -> tuple[T | None, Failure | None]:
    """Returns the result and None, or None and the error of memory or of a copy, whose frames no longer hold tensors."""
    try:
        return function(*args), None
    except (torch.OutOfMemoryError, HostCopyError) as error:
        failure: Failure = error
    chained: BaseException | None = failure
    while chained is not None:
        traceback.clear_frames(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__
    return None, failure


def explained(failure: Failure, why: str) -> Failure:
    """Returns the original error with a note on why the step did not run again, and reports the failure to the other ranks."""
    failure.add_note(f"compile_remat: the step was not run again: {why}.")
    note_failure(failure)
    return failure


def _read_random(devices: Sequence[torch.device]) -> dict[str, bytes]:
    return {place: state.numpy().tobytes() for place, state in read_random_state(devices).items()}


def _write_random(states: dict[str, bytes]) -> None:
    write_random_state({place: torch.frombuffer(bytearray(s), dtype=torch.uint8) for place, s in states.items()})


def _kept(arguments: tuple[Any, ...], most_bytes: int) -> list[Any]:
    """Returns the incoming gradients; weak references if they exceed `most_bytes`, since the backward drops them one by one."""
    flat = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments
    small = sum(t.nbytes for t in flat if isinstance(t, torch.Tensor)) <= most_bytes
    return [weakref.ref(t) if isinstance(t, torch.Tensor) and not small else t for t in flat]


def _found(tangent: Any) -> Any:
    value = tangent() if isinstance(tangent, weakref.ref) else tangent
    if value is None and tangent is not None:
        raise CannotRetry("a gradient that came into the backward has been freed")
    return value
