"""Option `check`: compares the first step of a compiled graph with that of the plan that recomputes nothing.

Both plans go through the same compiler, so both draw the same random numbers.  The first call that can be differentiated
runs each plan forward and backward on copies of the arguments, with random tangents that this check draws.  It compares outputs,
mutated arguments, gradients and random states.  Then the copies are dropped, the random state is restored and the user's step
runs; later calls cost one `if`.

The plan is compiled twice, and the check runs the second copy: in torch, the first backward of a compiled graph decides if later
backwards may keep the graph (`retain_graph`), and the user's own backward must be that first one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch.autograd_node import can_be_differentiated
from compile_remat._torch.delivery.returned_gradients import handing_back
from compile_remat._torch.tensor_arguments import own_tracing_context
from compile_remat.errors import CheckError, CheckWarning, warn
from compile_remat.inductor.entry import CustomPartitionerFn, without_partition_cache
from compile_remat.report import Report, amend, latest, recording
from compile_remat.verify.attribution import Arguments, SplitJoint, attribute
from compile_remat.verify.no_recompute import NoRecomputePartitioner
from compile_remat.verify.observation import GRADIENT, INPUT, OUTPUT, RANDOM, Key, NotComparable, Nudge, Observed
from compile_remat.verify.side_runs import SideRuns, StepFailed, first_line
from compile_remat.verify.tolerance import ErrorNorms, bound, error_norms, magnitude

LOG = logging.getLogger("compile_remat")

NUDGES = 2
"""Measurements of rounding: a single one of a tensor with one element may be zero by chance."""

Compiled = Callable[..., Any]


class RecordingPartitioner(CustomPartitionerFn):
    """Calls another partitioner and keeps the last joint graph with its report."""

    def __init__(self, inner: CustomPartitionerFn) -> None:
        self.inner = inner
        self.split: SplitJoint | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph; Inductor calls this for the bodies of nested regions first and for the whole graph last."""
        with recording() as new:
            modules: tuple[fx.GraphModule, fx.GraphModule] = self.inner(gm, joint_inputs, **kwargs)
        self.split = SplitJoint(gm, new[-1] if new else None)
        return modules

    def take(self) -> SplitJoint | None:
        """Return the recorded joint graph and drop it: torch 2.11 keeps a partitioner as long as the code compiled with it."""
        split, self.split = self.split, None
        return split

    def uuid(self) -> object:
        """Returns the uuid of the inner partitioner."""
        return self.inner.uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingPartitioner:
        """Returns this object: Inductor copies its options, and the record must stay in one object."""
        return self


def compile_checked(
    gm: fx.GraphModule,
    partitioner: CustomPartitionerFn,
    enter: Callable[[CustomPartitionerFn], Compiled],
    report_dir: str | None,
) -> Compiled:
    """Compile under the partitioner's plan, and under the plan that recomputes nothing; returns a callable that compares them once.

    Args:
        gm: The Dynamo graph that `enter` compiles.
        enter: Compiles the graph with the given partitioner.
    """
    arguments = Arguments.of(gm)
    observed, reference = RecordingPartitioner(partitioner), NoRecomputePartitioner()
    with without_partition_cache():
        compiled = enter(observed)
        split = observed.take()
        if split is None:  # inference: nothing is saved, so nothing can be recomputed
            return compiled
        outcome = Outcome(split.report, report_dir)
        with own_tracing_context(), recording() as again:
            twin = enter(partitioner)
            again.clear()
        try:
            with own_tracing_context():
                plain = enter(reference)
        except Exception as error:
            outcome.skipped(f"the plan that recomputes nothing does not compile ({first_line(error)})")
            return compiled
    runs = SideRuns(handing_back(twin), plain, reference, split.peak_bytes)
    pending: FirstStep | None = FirstStep(runs, arguments, split, outcome)

    def call(*args: Any) -> Any:
        nonlocal pending
        if pending is not None and can_be_differentiated(args):
            pending.run(args)  # an error leaves it pending: the next call fails in the same way
            pending = None
        return compiled(*args)

    return call


@dataclass(frozen=True)
class Outcome:
    """Writes the outcome of the comparison into the report and the log, and warns if it was skipped."""

    planned: Report | None
    report_dir: str | None

    def note(self, text: str) -> None:
        """Write `text` to the report, if there is one, and to the log."""
        LOG.info("check %s", text)
        if self.planned is not None:
            amend(latest(self.planned.graph_key) or self.planned, self.report_dir, check=text)

    def skipped(self, why: str) -> None:
        """Write the reason why nothing was compared, and warn."""
        self.note(f"skipped: {why}")
        warn(f"the first step is not checked: {why}", CheckWarning)


@dataclass(frozen=True)
class FirstStep:
    """One pending comparison with everything that it needs; dropped as a whole when it is done."""

    runs: SideRuns
    arguments: Arguments
    split: SplitJoint
    outcome: Outcome

    def run(self, args: Sequence[Any]) -> None:
        """Compare the two plans, or warn with the reason why they cannot be compared.

        Raises:
            CheckError: The results of the two plans differ by more than rounding explains.
        """
        try:
            with self.runs.isolated(args):
                self._compare()
        except NotComparable as why:
            self.outcome.skipped(str(why))
        except CheckError as error:
            self.outcome.note(f"failed: {error.tensor} {error.problem}")
            raise
        else:
            self.outcome.note("passed")

    def _compare(self) -> None:
        expected, epsilon = self.runs.expected(), self.runs.facts.epsilon
        try:
            actual = self.runs.actual()
        except StepFailed as failure:
            raise CheckError("the step", "", f"fails ({failure})", math.inf) from failure.__cause__
        suspects = [k for k in self._ordered(actual) if not is_same(actual[k], expected[k], epsilon)]
        rounding: dict[Key, list[ErrorNorms]] = {k: [] for k in suspects}
        for seed in range(NUDGES if suspects else 0):
            nudged = self.runs.expected(Nudge(epsilon, seed))
            for key in suspects:
                rounding[key].append(difference(nudged[key], expected[key]))
        different = [k for k in suspects if not is_same(actual[k], expected[k], epsilon, rounding[k])]
        if different:
            first = different[0]
            name, path, recomputed = attribute(first, self.arguments, self.split)
            problem = describe_difference(actual[first], expected[first], epsilon, rounding[first])
            size = difference(actual[first], expected[first]).largest
            raise CheckError(name, path, problem, size, recomputed, len(different) - 1)

    def _ordered(self, seen: Observed) -> list[Key]:
        """Returns the keys in order: outputs, mutated arguments, gradients in the order of the backward, random states."""
        places = {position: place for place, position in enumerate(self.split.gradient_order())}
        kinds = (OUTPUT, INPUT, GRADIENT, RANDOM)

        def place(key: Key) -> tuple[int, int]:
            return kinds.index(key[0]), places.get(int(key[1]), len(places)) if key[0] == GRADIENT else 0

        return sorted(seen, key=place)


# -- one observed value -------------------------------------------------------------------------------------------------


def difference(actual: Any, expected: Any) -> ErrorNorms:
    """Returns the error norms of two observed values; infinite if they differ and cannot be subtracted."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        if actual.shape == expected.shape and actual.dtype == expected.dtype:
            return error_norms(actual, expected)
        return ErrorNorms(math.inf, math.inf)
    is_equal = type(actual) is type(expected) and actual == expected
    return ErrorNorms(0.0, 0.0) if is_equal else ErrorNorms(math.inf, math.inf)


def is_same(actual: Any, expected: Any, epsilon: float, rounding: Sequence[ErrorNorms] = ()) -> bool:
    """Returns True if rounding explains the difference of two observed values."""
    apart = difference(actual, expected)
    if not isinstance(expected, torch.Tensor):
        return apart.largest == 0
    return not apart.exceeds(bound(expected, epsilon, rounding))


def describe_difference(actual: Any, expected: Any, epsilon: float, rounding: Sequence[ErrorNorms]) -> str:
    """Returns the difference in words, for an error message."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return f"is {_kind(actual)} instead of {_kind(expected)}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {_kind(actual)} instead of {_kind(expected)}"
    apart, allowed = difference(actual, expected), bound(expected, epsilon, rounding)
    own = magnitude(expected)
    return (
        f"differs by {apart.largest:.2e} (all elements together, as 2-norm: {apart.norm:.2e}), where rounding explains "
        f"{allowed.largest:.2e} ({allowed.norm:.2e}) and the numbers reach {own.largest:.2e} ({own.norm:.2e})"
    )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "missing" if value is None else repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
