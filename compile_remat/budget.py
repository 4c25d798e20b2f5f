"""The three settings that are amounts of memory: `memory_budget`, `reserve` and `optimizer_state`.

Each is a frozen value with `parse(raw)`, which reads any form that a user may write as an option or in an environment
variable, and `str(value)`, which `parse` reads back as an equal value (so a resolved value can go into a key, a log or a
file).
"""

import math
import numbers
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from compile_remat._util.suggestions import did_you_mean
from compile_remat._util.units import MIB, exact_size, parse_bytes
from compile_remat.errors import ConfigError

BUDGET_FORMS = (
    'a size with its unit ("8GiB", "8GB", "500MiB"), an int of at least 1 MiB (1048576) in bytes, '
    'a fraction in (0, 1] of what plain torch.compile takes, "min", "max" or "auto"'
)
RESERVE_FORMS = 'a percentage of the capacity ("5%"), a size with its unit ("2GiB"), an int of at least 1 MiB, or 0'
OPTIMIZER_FORMS = '"none", "sgd", "adamw", a size with its unit ("2GiB"), or an int of at least 1 MiB'


@dataclass(frozen=True)
class MemoryBudget:
    """The most bytes that the compiled graphs of one step may have live at once, in one of five forms.

    A fraction below 1 is a share of plain torch.compile's peak; 1 is `max`.  `min` is the lowest reachable peak, `max` the fastest
    plan that is nowhere worse than torch's own choice, `auto` the fastest plan that the device's free memory allows.
    `is_given` is False for the default if the user set no budget: torch's own ratios then come first.  For messages, `written` is
    the user's text, and `origin` the setting that it came from, in words; each is empty if unknown.
    """

    kind: Literal["bytes", "fraction", "min", "max", "auto"]
    value: int | float | None = None
    is_given: bool = field(default=True, compare=False)
    written: str = field(default="", compare=False)
    origin: str = field(default="", compare=False)

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Returns the budget of any form of `raw`; raises ConfigError, with the allowed forms, for any other value."""
        if isinstance(raw, cls):
            return raw
        try:
            return replace(cls._parsed(raw), written=str(raw).strip())
        except ValueError as error:
            raise ConfigError(f"{error} Allowed: {BUDGET_FORMS}.") from None

    @classmethod
    def _parsed(cls, raw: object) -> Self:
        match _folded(raw):
            case "min" | "max" | "auto" as word:
                return cls(word)
        number = _number(raw)
        if number is None:
            _refuse_percentage(raw)
            nbytes = _size(raw, ("min", "max", "auto"))
            if nbytes == 0:
                raise ValueError(f"{raw!r} is zero; a budget must be positive.")
            return cls("bytes", nbytes)
        if number <= 0:
            raise ValueError(f"{raw!r} is {'zero' if number == 0 else 'negative'}; a budget must be positive.")
        if number == 1:
            return cls("max")
        if number < 1:
            return cls("fraction", float(number))
        return cls("bytes", _whole_bytes(number, raw))

    def __str__(self) -> str:
        if self.kind == "bytes":
            return exact_size(int(self.value or 0))
        return repr(self.value) if self.kind == "fraction" else self.kind


@dataclass(frozen=True)
class Reserve:
    """Memory to keep free for other libraries and fragmentation: bytes, or a percentage of the device's capacity."""

    kind: Literal["bytes", "percent"]
    value: int | float

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Returns the reserve of `raw`: "5%", a size, bytes or 0; raises ConfigError for any other value."""
        if isinstance(raw, cls):
            return raw
        try:
            text = _folded(raw)
            if text.endswith("%"):
                return cls("percent", _percentage(text[:-1], raw))
            return cls("bytes", _amount(raw, ()))
        except ValueError as error:
            raise ConfigError(f"{error} Allowed: {RESERVE_FORMS}.") from None

    def of(self, capacity_bytes: int) -> int:
        """Returns the bytes to keep free on a device of `capacity_bytes`, rounded up."""
        return int(self.value) if self.kind == "bytes" else math.ceil(capacity_bytes * self.value / 100)

    def __str__(self) -> str:
        return exact_size(int(self.value)) if self.kind == "bytes" else f"{self.value!r}%"


@dataclass(frozen=True)
class OptimizerState:
    """Memory that the optimizer still allocates before the second step: a known optimizer, or bytes."""

    kind: Literal["none", "sgd", "adamw", "bytes"]
    nbytes: int = 0

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Returns the state of `raw`: a name, a size or bytes; raises ConfigError for any other value."""
        if isinstance(raw, cls):
            return raw
        match _folded(raw):
            case "none" | "sgd" | "adamw" as name:
                return cls(name)
        try:
            return cls("bytes", _amount(raw, ("none", "sgd", "adamw")))
        except ValueError as error:
            raise ConfigError(f"{error} Allowed: {OPTIMIZER_FORMS}.") from None

    def of(self, trainable_bytes: int) -> int:
        """Returns the bytes of state for parameters of `trainable_bytes`: one copy for momentum, two for Adam's moments."""
        copies = {"none": 0, "sgd": 1, "adamw": 2}
        return self.nbytes if self.kind == "bytes" else copies[self.kind] * trainable_bytes

    def workspace_of(self, parameter_bytes: int) -> int:
        """Returns the temporary bytes of a step of one parameter of `parameter_bytes`, with ``foreach=False`` and not fused.

        SGD with weight decay adds the parameter to a copy of the gradient; AdamW allocates a root and a quotient.
        """
        copies = {"none": 0, "sgd": 1, "adamw": 2, "bytes": 0}
        return copies[self.kind] * parameter_bytes

    def foreach_workspace_of(self, trainable_bytes: int) -> int:
        """Returns the temporary bytes of a step of all parameters at once: ``foreach=True``, torch's default on a GPU.

        SGD with weight decay adds all parameters to copies of their gradients; AdamW allocates all roots.
        """
        copies = {"none": 0, "sgd": 1, "adamw": 1, "bytes": 0}
        return copies[self.kind] * trainable_bytes

    def __str__(self) -> str:
        return exact_size(self.nbytes) if self.kind == "bytes" else self.kind


def _amount(raw: object, words: tuple[str, ...]) -> int:
    """Returns the bytes of a size or a number, zero included; raises ValueError for any other value."""
    number = _number(raw)
    if number is None:
        return _size(raw, words)
    if number < 0:
        raise ValueError(f"{raw!r} is negative.")
    return _whole_bytes(number, raw) if number else 0


def _size(raw: object, words: tuple[str, ...]) -> int:
    """Returns the bytes of a text with a unit; its ValueError suggests one of `words` if the text is similar to one."""
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a size.")
    try:
        return parse_bytes(raw)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if "?" in text else f"{text.rstrip('.')}.{did_you_mean(raw, words)}") from None


def _whole_bytes(number: int | float, raw: object) -> int:
    """Returns a number without unit as bytes; refuses numbers below 1 MiB, which almost surely lack a unit."""
    if number < MIB:
        shown = f"{number:g}" if isinstance(number, float) else str(number)
        raise ValueError(f'{raw!r} has no unit; write "{shown}MiB" or "{shown}GiB".')
    if number != int(number):
        raise ValueError(f"{raw!r} is not a whole number of bytes.")
    return int(number)


def _refuse_percentage(raw: object) -> None:
    """Raise ValueError for a percentage such as "50%", which `reserve` accepts; the error suggests the fraction."""
    text = _folded(raw)
    number = _number_in(text[:-1]) if text.endswith("%") else None
    if number is not None and 0 < number <= 100:
        raise ValueError(f'{raw!r} is a percentage. Did you mean "{number / 100:g}"?')


def _percentage(text: str, raw: object) -> int | float:
    number = _number(text)
    if number is None or not 0 <= number < 100:
        raise ValueError(f"{raw!r} is not a percentage from 0 to below 100.")
    return int(number) if number == int(number) else number


def _number(raw: object) -> int | float | None:
    """Returns `raw` as a finite number, or None if it is no number; raises ValueError for a bool, NaN and infinity."""
    if isinstance(raw, bool):
        raise ValueError(f"{raw!r} is a truth value, not an amount of memory.")
    number: int | float | None = None
    if isinstance(raw, numbers.Integral):
        number = int(raw)
    elif isinstance(raw, numbers.Real):
        number = float(raw)
    elif isinstance(raw, str):
        number = _number_in(raw)
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError(f"{raw!r} is not a finite number.")
    return number


def _number_in(text: str) -> int | float | None:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return None


def _folded(raw: object) -> str:
    return raw.strip().lower() if isinstance(raw, str) else ""
