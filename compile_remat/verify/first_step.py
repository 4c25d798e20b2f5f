"""Option `check`: the first step of a compiled graph is compared with that of the plan that recomputes nothing.

Both plans go through the same compiler, so that both draw the same random numbers.  The first call that can be
differentiated runs either one forward and backward on copies, with tangents drawn here, and compares all that can be seen:
outputs, what arguments became, gradients, the random state.  Then everything is put back and dropped, and the step that
counts runs; later calls cost one `if`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compile_remat._torch.autograd_node import can_be_differentiated
from compile_remat._torch.tensor_arguments import own_tracing_context
from compile_remat.errors import CheckError, CheckWarning
from compile_remat.inductor.entry import CustomPartitionerFn, without_partition_cache
from compile_remat.report import Report, amend, recording
from compile_remat.verify.attribution import Arguments, Trace, blame
from compile_remat.verify.no_recompute import ReferencePartitioner
from compile_remat.verify.observation import GRADIENT, INPUT, OUTPUT, RANDOM, Key, NotComparable, Nudge, Observed
from compile_remat.verify.side_runs import StepFailed, Trials, first_line
from compile_remat.verify.tolerance import Gap, allowance, gap, size

LOG = logging.getLogger("compile_remat")

NUDGES = 2
"""How often rounding is measured; one measurement of a tensor of one element may be zero by chance."""

Compiled = Callable[..., Any]


class ObservedPartitioner(CustomPartitionerFn):
    """Passes everything on to a partitioner and remembers the last joint graph with its report."""

    def __init__(self, inner: CustomPartitionerFn) -> None:
        self.inner = inner
        self.trace: Trace | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Called for the bodies of nested regions first and for the whole graph last."""
        with recording() as new:
            modules: tuple[fx.GraphModule, fx.GraphModule] = self.inner(gm, joint_inputs, **kwargs)
        self.trace = Trace(gm, new[-1] if new else None)
        return modules

    def take(self) -> Trace | None:
        """What was seen; forgotten here, because torch 2.11 keeps a partitioner as long as what it compiled."""
        trace, self.trace = self.trace, None
        return trace

    def uuid(self) -> object:
        """The partitioner's own."""
        return self.inner.uuid()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservedPartitioner:
        """Inductor copies its options; what is remembered here must stay in one place."""
        return self


def compile_checked(
    gm: fx.GraphModule,
    partitioner: CustomPartitionerFn,
    enter: Callable[[CustomPartitionerFn], Compiled],
    report_dir: str | None,
) -> Compiled:
    """Compile under the partitioner's plan, and under the plan that recomputes nothing; compare at the first step.

    Args:
        gm: The Dynamo graph that `enter` compiles.
        enter: Compiles it with the partitioner that it gets.
    """
    arguments = Arguments.of(gm)
    observed, reference = ObservedPartitioner(partitioner), ReferencePartitioner()
    with without_partition_cache():
        compiled = enter(observed)
        trace = observed.take()
        if trace is None:  # inference: nothing is saved, so nothing can be recomputed
            return compiled
        ending = Ending(trace.report, report_dir)
        try:
            with own_tracing_context():
                plain = enter(reference)
        except Exception as error:
            ending.skipped(f"the plan that recomputes nothing does not compile ({first_line(error)})")
            return compiled
    trials = Trials(compiled, plain, reference, trace.peak_bytes)
    pending: FirstStep | None = FirstStep(trials, arguments, trace, ending)

    def call(*args: Any) -> Any:
        nonlocal pending
        if pending is not None and can_be_differentiated(args):
            pending.run(args)  # an error leaves it pending: the next call fails in the same way
            pending = None
        return compiled(*args)

    return call


@dataclass(frozen=True)
class Ending:
    """Where it is said how the comparison ended."""

    planned: Report | None
    report_dir: str | None

    def note(self, text: str) -> None:
        """Into the report, where there is one, and the log."""
        LOG.info("check %s", text)
        if self.planned is not None:
            amend(self.planned, self.report_dir, check=text)

    def skipped(self, why: str) -> None:
        """And as a warning."""
        self.note(f"skipped: {why}")
        warnings.warn(f"compile_remat: the first step is not checked: {why}", CheckWarning, stacklevel=4)


@dataclass(frozen=True)
class FirstStep:
    """The comparison, with all that it needs; dropped as a whole when it has been made."""

    trials: Trials
    arguments: Arguments
    trace: Trace
    ending: Ending

    def run(self, args: Sequence[Any]) -> None:
        """Compare; warn where that cannot be done.

        Raises:
            CheckError: The two plans do not do the same.
        """
        try:
            with self.trials.on_the_side(args):
                self._compare()
        except NotComparable as why:
            self.ending.skipped(str(why))
        except CheckError as error:
            self.ending.note(f"failed: {error.tensor} {error.problem}")
            raise
        else:
            self.ending.note("passed")

    def _compare(self) -> None:
        expected, epsilon = self.trials.expected(), self.trials.facts.epsilon
        try:
            actual = self.trials.actual()
        except StepFailed as failure:
            raise CheckError("the step", "", f"fails ({failure})", math.inf) from failure.__cause__
        suspects = [k for k in self._ordered(actual) if not is_same(actual[k], expected[k], epsilon)]
        noise: dict[Key, list[Gap]] = {k: [] for k in suspects}
        for seed in range(NUDGES if suspects else 0):
            nudged = self.trials.expected(Nudge(epsilon, seed))
            for key in suspects:
                noise[key].append(distance(nudged[key], expected[key]))
        different = [k for k in suspects if not is_same(actual[k], expected[k], epsilon, noise[k])]
        if different:
            first = different[0]
            name, path, recomputed = blame(first, self.arguments, self.trace)
            problem = in_words(actual[first], expected[first], epsilon, noise[first])
            size = distance(actual[first], expected[first]).largest
            raise CheckError(name, path, problem, size, recomputed, len(different) - 1)

    def _ordered(self, seen: Observed) -> list[Key]:
        """As they come: outputs, what arguments became, gradients as the backward reaches them, the random state."""
        places = {position: place for place, position in enumerate(self.trace.gradient_order())}
        kinds = (OUTPUT, INPUT, GRADIENT, RANDOM)

        def place(key: Key) -> tuple[int, int]:
            return kinds.index(key[0]), places.get(int(key[1]), len(places)) if key[0] == GRADIENT else 0

        return sorted(seen, key=place)


# -- one thing observed -------------------------------------------------------------------------------------------------


def distance(actual: Any, expected: Any) -> Gap:
    """How far apart; infinite where the two cannot be subtracted."""
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        if actual.shape == expected.shape and actual.dtype == expected.dtype:
            return gap(actual, expected)
        return Gap(math.inf, math.inf)
    is_equal = type(actual) is type(expected) and actual == expected
    return Gap(0.0, 0.0) if is_equal else Gap(math.inf, math.inf)


def is_same(actual: Any, expected: Any, epsilon: float, noise: Sequence[Gap] = ()) -> bool:
    """Whether rounding explains the difference."""
    apart = distance(actual, expected)
    if not isinstance(expected, torch.Tensor):
        return apart.largest == 0
    return not apart.exceeds(allowance(expected, epsilon, noise))


def in_words(actual: Any, expected: Any, epsilon: float, noise: Sequence[Gap]) -> str:
    """What is wrong with it."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return f"is {_kind(actual)} instead of {_kind(expected)}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {_kind(actual)} instead of {_kind(expected)}"
    apart, allowed = distance(actual, expected), allowance(expected, epsilon, noise)
    own = size(expected)
    return (
        f"differs by {apart.largest:.2e} (all elements together, as 2-norm: {apart.norm:.2e}), where rounding explains "
        f"{allowed.largest:.2e} ({allowed.norm:.2e}) and the numbers reach {own.largest:.2e} ({own.norm:.2e})"
    )


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "missing" if value is None else repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
