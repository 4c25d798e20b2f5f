"""Raises an error with the user's names for inputs that changed between a forward and its backward, which reads them again.

Covers only inputs that plain torch.compile's backward does not read (`Report.inputs_beyond_plain`); for the others, autograd's own
check applies.  Versions are compared before any part of the backward runs, because hooks in it may step the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from compile_remat._torch.autograd_node import Backward, says_changed
from compile_remat._torch.tensor_arguments import is_plain_tensor, version_of
from compile_remat.errors import CheckWarning, InputChangedError, warn
from compile_remat.report import Report
from compile_remat.runtime.region import CallInFlight, Hook
from compile_remat.verify.first_step import Outcome
from compile_remat.verify.observation import NotComparable
from compile_remat.verify.side_runs import require_memory
from compile_remat.verify.tolerance import error_norms, magnitude


@dataclass(frozen=True)
class _Version:
    """Weak references to a tensor and to its base, if it is a view, with their shared version after the forward.

    An argument may be freed while its base is still there and changed.
    """

    tensors: tuple[TensorWeakRef, ...]
    number: int | None

    @staticmethod
    def of(tensor: torch.Tensor) -> _Version:
        owners = (tensor, tensor._base)
        return _Version(tuple(TensorWeakRef(t) for t in owners if t is not None), version_of(tensor))

    @property
    def has_changed(self) -> bool:
        """True if one of the tensors still exists and was written in place since the forward."""
        found = (reference() for reference in self.tensors)
        return any(t is not None and version_of(t) != self.number for t in found)


@dataclass(frozen=True)
class _Inputs:
    """The inputs that a backward will read again, as they were after the forward.

    Attributes:
        versions: Version of each input, by position.
        copies: The input and a copy of it on the host, by position; empty unless a check compares them.
    """

    versions: dict[int, _Version]
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]]


class ChangedInputs(Hook):
    """The hook that raises an error with the names of the inputs that have changed.

    Args:
        names: Names of all arguments, as the user writes them.
        setting: The setting `inputs`.
        checks: True to check the first step: copies of the inputs show changes that move no version (`.data`, numpy).
        report_dir: Folder for the report with the outcome of the check.
    """

    def __init__(
        self, names: Sequence[str], setting: str, *, checks: bool = False, report_dir: str | None = None
    ) -> None:
        self.names, self.setting = tuple(names), setting
        self.checks, self.report_dir = checks, report_dir

    def after_forward(self, call: CallInFlight, args: Sequence[Any], node: Any) -> None:
        """Record the versions of the inputs that the backward will read again, and copies if the step is checked."""
        report = call.running.report
        beyond = report.inputs_beyond_plain
        if not beyond:
            return
        versions = {k: _Version.of(args[k]) for k in (*beyond, *report.inputs_as_plain)}
        copies = self._copies({k: args[k] for k in beyond}) if self.checks else {}
        call.notes[self] = _Inputs(versions, copies)

    def backward(self, call: CallInFlight, run: Backward, *arguments: Any) -> Any:
        """Run the backward; returns its gradients.

        Raises:
            InputChangedError: Autograd's version check fails because of such an input, or a copy differs from its input.
        """
        report, seen = call.running.report, call.notes.get(self)
        changed = set() if seen is None else {k for k, version in seen.versions.items() if version.has_changed}
        is_as_plain = not changed.isdisjoint(report.inputs_as_plain)  # then plain torch.compile raises, too
        if seen is not None and seen.copies and not is_as_plain:
            self._compare(report, seen)
        del seen
        try:
            return run(*arguments)
        except RuntimeError as error:
            if is_as_plain or not changed or not says_changed(error):
                raise
            raise InputChangedError(self._names(changed), self.setting, "changed in place") from error

    def _names(self, positions: set[int]) -> tuple[str, ...]:
        return tuple(self.names[k] for k in sorted(positions))

    # -- the first step under `check` -------------------------------------------------------------------------------------

    def _copies(self, inputs: dict[int, torch.Tensor]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        comparable = {k: t.detach() for k, t in inputs.items() if is_plain_tensor(t)}
        try:
            require_memory(0, sum(t.nbytes for t in comparable.values()), ())
        except NotComparable as why:
            warn(f"changes of inputs before the backward are not looked for: {why}", CheckWarning)
            return {}
        return {k: (t, t.to("cpu", copy=True)) for k, t in comparable.items()}

    def _compare(self, report: Report, seen: _Inputs) -> None:
        """Compare the inputs of a first step with their copies.

        Raises:
            InputChangedError: An input differs from its copy.
        """
        apart = {k: error_norms(now.cpu(), then).largest for k, (now, then) in seen.copies.items()}
        changed = {k for k, largest in apart.items() if largest > 0}
        if not changed:
            self.checks = False
            return
        first = max(changed, key=apart.__getitem__)
        reached = magnitude(seen.copies[first][1]).largest
        most = f", most of all `{self.names[first]}`," * (len(changed) > 1)
        problem = f"changed{most} by {apart[first]:.2e} (its numbers reached {reached:.2e})"
        Outcome(report, self.report_dir).note(f"failed: {', '.join(self._names(changed))} changed before the backward")
        raise InputChangedError(self._names(changed), self.setting, problem)
