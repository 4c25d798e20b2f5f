"""Errors and warnings: `RematError` is the base of every error of this package.

The arguments of each exception are its fields, and the text is built from them, so every exception survives pickle, copy
and a trip through a worker process. If the advice depends on the situation, the text ends with the advice.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from compile_remat._util.live_buffer import LiveBuffer
from compile_remat._util.units import MIB, exact_size, format_bytes
from compile_remat._util.user_warnings import PREFIX, warn_user

E = TypeVar("E", bound=BaseException)

_SHOWN = 5
_SHOWN_OPS = 20


class RematError(RuntimeError):
    """Base of every error that compile-remat raises on purpose."""


class ConfigError(RematError, ValueError):
    """A setting or an option does not exist, or does not take the given value."""


class GradientError(RematError):
    """An incomplete gradient left a backward early, or a gradient that belongs to another parameter."""


class DeviceError(RematError, ValueError):
    """A device name is not in the table, or a device file cannot be read."""


class PlanMismatchError(RematError):
    """A plan file belongs to another graph or to another version of the format, or cannot be read."""


class MissingExtraError(RematError, ImportError):
    """An optional package is missing that the requested function needs."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)
        self.package, self.extra = package, extra

    def __str__(self) -> str:
        return f"this needs {self.package}, which is not installed: pip install 'compile-remat[{self.extra}]'"


@contextmanager
def needed(package: str, extra: str) -> Iterator[None]:
    """Inside, importing a package that is not installed raises MissingExtraError; another error of its import stays as it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(package, extra) from None


class CheckWarning(UserWarning):
    """A first step could not be compared with the plan that recomputes nothing (option `check`)."""


class PlannerWarning(UserWarning):
    """The planner could not fulfil a request; training continues with a safer plan."""


class SettingWarning(UserWarning):
    """Two settings contradict each other, and the text names the one that holds; or a setting does nothing where it was given."""


class BudgetError(RematError):
    """No plan fits the budget. `floor_bytes` is the lowest reachable peak, `largest` the tensors live at that peak.

    `written` is the budget as the user wrote it, `hint` the reason why rows are not in slices, `constant_floor_bytes` the lowest
    reachable peak with `inputs="constant"`, 0 if that is no lower.  The text begins with the cause and ends with the budget that is
    enough, because terminals show the end of a long traceback.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        largest: tuple[LiveBuffer, ...] = (),
        written: str = "",
        hint: str = "",
        constant_floor_bytes: int = 0,
    ) -> None:
        # Only the fields go to the base class: pickle passes its args back to this constructor.
        others = (hint, constant_floor_bytes) if hint or constant_floor_bytes else ()
        super().__init__(budget_bytes, floor_bytes, largest, written, *others)
        self.hint = hint
        self.constant_floor_bytes = constant_floor_bytes
        self.graph_key = ""  # key of the planned graph; empty if unknown
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.largest = largest
        self.written = written

    def __str__(self) -> str:
        shown = sorted(self.largest, key=lambda t: (-t.nbytes, t.name))[:_SHOWN]
        has_unit = not self.written.isdigit() and self.written
        budget = self.written if has_unit else format_bytes(self.budget_bytes)
        lines = [
            f"no plan fits memory_budget = {budget}: {self._problem()}",
            f"(budget {self.budget_bytes:,} bytes, lowest peak {self.floor_bytes:,} bytes).",
        ]
        if shown:
            lines[-1] += f" The largest tensor{'s' * (len(shown) > 1)} live at that peak:"
            lines.extend(f"  {tensor}" for tensor in shown)
        lines += [f"Slices of rows do not lower that peak: {self.hint}."] if self.hint else []
        lines += [self._constant()] if self.constant_floor_bytes else []
        lines.append(self._advice())
        return "\n".join(lines)

    def with_hint(self, hint: str) -> "BudgetError":
        """Returns the error with the reason why rows are not in slices; a subclass, which has its own advice, is unchanged."""
        if type(self) is not BudgetError:
            return self
        return self._with(hint, self.constant_floor_bytes)

    def with_constant_floor(self, constant_floor_bytes: int) -> "BudgetError":
        """Returns the error with the floor under `inputs="constant"`; a subclass, which has its own advice, is unchanged."""
        return self._with(self.hint, constant_floor_bytes) if type(self) is BudgetError else self

    def with_floor(self, floor_bytes: int, largest: tuple[LiveBuffer, ...]) -> "BudgetError":
        """Returns the error with the lowest peak that was observed, and the tensors live at that peak."""
        other = copy.copy(self)
        BudgetError.__init__(
            other, self.budget_bytes, floor_bytes, largest, self.written, self.hint, self.constant_floor_bytes
        )
        other.graph_key = self.graph_key
        return other

    def _with(self, hint: str, constant_floor_bytes: int) -> "BudgetError":
        other = BudgetError(self.budget_bytes, self.floor_bytes, self.largest, self.written, hint, constant_floor_bytes)
        other.graph_key = self.graph_key
        return other

    def _constant(self) -> str:
        return (
            f'With inputs="constant" it is {_both(self.constant_floor_bytes)}: then no tensor that the graph\n'
            "reads from outside (an input, a parameter, a buffer) may change until its backward has run."
        )

    def _problem(self) -> str:
        return f"the lowest reachable peak of this graph is {format_bytes(self.floor_bytes)}"

    def _advice(self) -> str:
        enough = exact_size(-(-self.floor_bytes // MIB) * MIB)
        return (
            "A smaller batch, shorter sequences or a lower precision lower it. Gradients and outputs cannot be recomputed.\n"
            f'What to do: set memory_budget to "{enough}" or more, or to "min" for the lowest peak.'
        )


class SharedBudgetError(BudgetError):
    """No choice of plans fits the budget that several graphs of a step share.

    `floor_bytes` is the lowest peak that was found for the step, or for one graph beside the others; in the latter case,
    `others_bytes` are the bytes that the graphs before it hold.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        largest: tuple[LiveBuffer, ...] = (),
        others_bytes: int = 0,
        num_runs: int = 1,
        written: str = "",
    ) -> None:
        super().__init__(budget_bytes, floor_bytes, largest, written)
        self.args = (budget_bytes, floor_bytes, largest, others_bytes, num_runs, written)
        self.others_bytes = others_bytes
        self.num_runs = num_runs

    def _problem(self) -> str:
        lowest = format_bytes(self.floor_bytes)
        if self.others_bytes:
            others = format_bytes(self.others_bytes)
            return f"other graphs of the same step hold {others}, and with this one the step comes to {lowest}"
        return f"the lowest peak found for a step that runs compiled graphs {self.num_runs} times is {lowest}"


class TagConflictError(BudgetError):
    """No plan fits the budget, and the peak would be lower without MUST_SAVE and MUST_RECOMPUTE.

    `free_floor_bytes` is the lowest reachable peak without these tags; `tagged` are the tensors with these tags, largest
    first.
    """

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        largest: tuple[LiveBuffer, ...] = (),
        free_floor_bytes: int = 0,
        tagged: tuple[LiveBuffer, ...] = (),
        written: str = "",
    ) -> None:
        super().__init__(budget_bytes, floor_bytes, largest, written)
        self.args = (budget_bytes, floor_bytes, largest, free_floor_bytes, tagged, written)
        self.free_floor_bytes = free_floor_bytes
        self.tagged = tagged

    def _advice(self) -> str:
        lines = [
            "The policy of selective checkpointing raises that peak: without MUST_SAVE and MUST_RECOMPUTE\n"
            f"it is {_both(self.free_floor_bytes)}. The largest tensors with these tags:"
        ]
        lines += [f"  {tensor}" for tensor in self.tagged[:_SHOWN]]
        if len(self.tagged) > _SHOWN:
            lines.append(f"  and {len(self.tagged) - _SHOWN} more")
        lines.append(
            "Let the policy answer PREFER_SAVE or PREFER_RECOMPUTE for them: a budget may set those tags aside."
        )
        return "\n".join([*lines, super()._advice()])


class CheckError(RematError):
    """The first step differs from that of the plan that recomputes nothing.

    Attributes:
        tensor: The first tensor that differs: `output 0`, `the gradient of 0.weight`, `the new value of 1.running_mean`.
        module_path: The module of the tensor, as the user writes it; empty if unknown.
        problem: The difference in words.
        difference: The largest difference of an element; `inf` if the two tensors cannot be subtracted.
        recomputed: Recomputed values on which this tensor depends, with their origins, in graph order.
        others: Number of further tensors that differ.
    """

    def __init__(
        self,
        tensor: str,
        module_path: str,
        problem: str,
        difference: float,
        recomputed: tuple[str, ...] = (),
        others: int = 0,
    ) -> None:
        super().__init__(tensor, module_path, problem, difference, recomputed, others)
        self.tensor = tensor
        self.module_path = module_path
        self.problem = problem
        self.difference = difference
        self.recomputed = recomputed
        self.others = others

    def __str__(self) -> str:
        where = f" (module {self.module_path})" if self.module_path else ""
        lines = [f"the first step differs from the plan that recomputes nothing: {self.tensor}{where} {self.problem}."]
        if self.others:
            lines.append(f"It is the first of {self.others + 1} tensors that differ.")
        if self.recomputed:
            shown = self.recomputed[:_SHOWN_OPS]
            rest = len(self.recomputed) - len(shown)
            lines.append(f"Recomputed on the way to it ({len(self.recomputed)}):")
            lines.extend(f"  {name}" for name in shown)
            lines.extend([f"  and {rest} more"] if rest else [])
        else:
            lines.append("Nothing is recomputed on the way to it.")
        lines.append(
            "This is an error of compile-remat, not of the model; please report it with this text.\n"
            'What to do: train with plain torch.compile until it is mended, or try another memory_budget with check="1".'
        )
        return "\n".join(lines)


class InputChangedError(RematError):
    """An input changed before the backward reads it again; the backward of plain torch.compile does not read it.

    Attributes:
        inputs: Names of the changed inputs, as the user writes them: `0.weight`, or `x` for an argument of the function itself.
        setting: The setting `inputs`: `as_plain` or `constant`.
        problem: The change in words.
    """

    def __init__(self, inputs: tuple[str, ...], setting: str, problem: str) -> None:
        super().__init__(inputs, setting, problem)
        self.inputs, self.setting, self.problem = inputs, setting, problem

    def __str__(self) -> str:
        shown = [f"`{name}`" for name in self.inputs[:_SHOWN]]
        more = len(self.inputs) - len(shown)
        names = ", ".join(shown) + f" and {more} more" * bool(more)
        it, was, a_copy = ("it", "was", "a copy") if len(self.inputs) == 1 else ("them", "were", "copies")
        cures = [f"change {it} after the backward", f"give the compiled function {a_copy} (`clone`)"]
        if self.setting == "constant":
            cures.append(
                'set inputs="as_plain", the default, under which no backward reads more than that of plain torch.compile'
            )
        return (
            f"{names} {was} {self.problem} between the forward of a compiled graph and its backward. This backward reads {it} "
            f"again to recompute activations; that of plain torch.compile does not.\nWhat to do: {', or '.join(cures)}."
        )


class PassError(RematError):
    """A pass of the setting `joint_passes` failed, or left a joint graph that cannot be planned.

    Attributes:
        name: The name of its function or class.
        problem: The problem in words.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return (
            f"joint_passes: the pass {self.name} {self.problem}.\nWhat to do: mend the pass (docs/internals/writing-passes.md has "
            "the rules), or leave it out of joint_passes."
        )


class RankError(RematError):
    """Processes that train together cannot go on together: one of them has failed, or their plans for one graph differ.

    Attributes:
        ranks: The ranks that failed, or whose plans differ.
        problem: The problem in words.
        text: The text of a failed rank's error; empty if no rank failed.
    """

    def __init__(self, ranks: tuple[int, ...], problem: str, text: str = "") -> None:
        super().__init__(ranks, problem, text)
        self.ranks, self.problem, self.text = ranks, problem, text

    def __str__(self) -> str:
        if self.text:
            return f"{self.problem}, so this rank stops, too. The error of that rank:\n{self.text}"
        return (
            f"{self.problem}.\nWhat to do: give all ranks the same settings, versions and devices (the option `device` names "
            "one), or set rank_timeout=0, which lets plans differ."
        )


def find_error(error: BaseException | None, kind: type[E]) -> E | None:
    """Returns the first exception of type `kind` in the chain, or None; torch wraps exceptions that a partitioner raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        inner = getattr(error, "inner_exception", None)
        error = inner or error.__cause__ or error.__context__
    return None


def without_traceback(error: E) -> E:
    """Returns a copy of the error without traceback and chain, whose frames hold the model and its inputs."""
    found = copy.copy(error)
    found.__traceback__ = found.__cause__ = found.__context__ = None
    if hasattr(found, "__notes__"):
        found.__notes__ = [*found.__notes__]
    return found


def _both(nbytes: int) -> str:
    """Returns rounded and exact bytes as text, since a budget just below the floor rounds to the same text as the floor."""
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


def warn(message: str, category: type[Warning] = PlannerWarning) -> None:
    """Warn at the user's line, once in a process for one message: a request is not fulfilled, and training continues."""
    warn_user(message if message.startswith("compile_remat") else PREFIX + message, category)


def warn_unwritable(setting: str, folder: str, error: OSError, lost: str) -> None:
    """Warn, once for a folder and a cause, that the files of a setting cannot be written, and that training goes on.

    Args:
        lost: A clause that says what there is without them.
    """
    warn(
        f"{setting}: {folder} cannot be written ({error.strerror or error}); training goes on, {lost}. "
        f"What to do: set {setting} to a folder with write access and free space, or leave it out."
    )
