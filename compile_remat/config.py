"""Settings: their parsers, defaults and origins, and one frozen, hashable value that the rest of the code reads.

An option of `torch.compile` beats the environment variable `REMAT_<NAME>`, which beats the default. None as an option
and an empty variable count as not given. Every value passes through the parser of its row, also if `RematConfig` is
built directly. To add a setting, add a row to the class; "A new setting" in CONTRIBUTING.md lists what else it needs.
"""

import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, ParamSpec, Self, TypeVar, cast

from compile_remat._util.suggestions import closest, did_you_mean
from compile_remat._util.user_pass import UserPass
from compile_remat.budget import MemoryBudget, OptimizerState, Reserve
from compile_remat.errors import ConfigError, warn

ENV_PREFIX = "REMAT_"

LONGEST_SECONDS = 1_000_000
"""Largest `time_limit`: eleven days of search; also the largest `rank_timeout`."""

NARROW_IS_GONE = (
    "does nothing any more and goes with the next version: masks and indices are saved as they are. Leave it out."
)

_LOG = logging.getLogger("compile_remat")
_T = TypeVar("_T")
_P = ParamSpec("_P")


def _row(parse: Callable[[object], _T], default: _T) -> _T:
    """Returns the field of one setting, with its parser and its default."""
    return field(default=default, metadata={"parse": parse})


def _choice(*names: str) -> Callable[[object], str]:
    """Returns a parser for one of `names`, in upper or lower case."""

    def parse(raw: object) -> str:
        name = raw.strip().lower() if isinstance(raw, str) else str(raw)
        if name in names:
            return name
        raise ConfigError(f"{raw!r} is not a choice. Allowed: {', '.join(names)}.{did_you_mean(name, names)}")

    return parse


def _switch(raw: object) -> bool:
    """Parses 1, 0, true or false."""
    text = str(raw).strip().lower()
    if text not in ("0", "1", "true", "false"):
        raise ConfigError(f"{raw!r} is not a choice. Allowed: 0, 1.")
    return text in ("1", "true")


def _instances(raw: object) -> int | None:
    """Parses `learn`, which becomes None, or a whole number from 1."""
    text = str(raw).strip().lower()
    if raw is None or text in ("learn", "none"):
        return None
    if isinstance(raw, bool) or not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{raw!r} is not a choice. Allowed: learn, or a whole number from 1.")
    return int(text)


def _capacity(raw: object) -> int | None:
    """Parses a size; None or "none" for the device's own capacity."""
    if raw is None or str(raw).strip().lower() == "none":
        return None
    budget = MemoryBudget.parse(raw)
    if budget.kind != "bytes":
        raise ConfigError(
            f'{raw!r} is not a size. Allowed: a size with its unit ("64GiB"), an int of at least 1 MiB, or none.'
        )
    return int(budget.value or 0)


def _log_level(raw: object) -> str | None:
    """Parses a level of Python's logging; None or "none" leaves the logger as it is."""
    return None if raw is None or str(raw).strip().lower() == "none" else _choice("warning", "info", "debug")(raw)


def _up_to(most: int) -> Callable[[object], int]:
    """Returns a parser for a whole number from 0 to `most`."""

    def parse(raw: object) -> int:
        text = str(raw).strip()
        if isinstance(raw, bool) or not text.isdecimal() or int(text) > most:
            raise ConfigError(f"{raw!r} is not a choice. Allowed: {', '.join(map(str, range(most + 1)))}.")
        return int(text)

    return parse


MOST_SLICES = 4096
"""Largest number of `slices`: no model has so many rows that more slices would help."""


def _slices(raw: object) -> str | int:
    """Parses `off`, `auto`, or a whole number from 1; 1 becomes `off`."""
    text = str(raw).strip().lower()
    if text in ("off", "auto"):
        return text
    if isinstance(raw, bool) or not text.isdecimal() or not 1 <= int(text) <= MOST_SLICES:
        raise ConfigError(f"{raw!r} is not a choice. Allowed: off, auto, or a whole number from 1 to {MOST_SLICES}.")
    return int(text) if int(text) > 1 else "off"


def _passes(raw: object) -> tuple[UserPass, ...] | None:
    """Parses one callable or several; None or "none" for no pass.  Text names no pass, so the environment holds none."""
    if raw is None or (isinstance(raw, str) and raw.strip().lower() == "none"):
        return None
    if isinstance(raw, str):
        raise ConfigError("a pass is a callable, not text: give it in options, or to RematConfig.")
    given = raw if isinstance(raw, tuple | list) else (raw,)
    return tuple(map(_pass, given)) or None


def _pass(given: object) -> UserPass:
    if isinstance(given, UserPass):
        return given
    if not callable(given):
        raise ConfigError(
            f"{given!r} is not callable. Allowed: a tuple of callables that take the joint fx.Graph, or none."
        )
    try:
        return UserPass.of(given)
    except Exception as error:
        raise ConfigError(f"the uuid of {given!r} cannot be read: {type(error).__name__}: {error}.") from error


def _seconds(raw: object) -> float | None:
    """Parses a number of seconds above 0; None or "none" for a limit by the size of the graph."""
    text = str(raw).strip().lower()
    if raw is None or text == "none":
        return None
    try:
        seconds = math.nan if isinstance(raw, bool) else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigError(
            f"{raw!r} is not a choice. Allowed: a number of seconds above 0, up to {LONGEST_SECONDS}, or none."
        )
    return seconds


def _timeout(raw: object) -> int:
    """Parses a whole number of seconds, 0 included."""
    text = str(raw).strip()
    if isinstance(raw, bool) or not text.isdecimal() or int(text) > LONGEST_SECONDS:
        raise ConfigError(f"{raw!r} is not a choice. Allowed: a whole number of seconds, 0 to {LONGEST_SECONDS}.")
    return int(text)


def _device(raw: object) -> str:
    """Returns a name for the device table in normal spelling, or the absolute path of a JSON file; neither need exist."""
    text = os.fspath(raw).strip() if isinstance(raw, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{raw!r} is not a device. Allowed: detect, a name of the device table, or a .json file.")
    if text.lower().endswith(".json"):
        return os.path.abspath(os.path.expanduser(text))
    return text.lower().replace("_", "-").replace(" ", "-")


def _folder(raw: object) -> str | None:
    """Returns the absolute path of a folder; None or "none" means no folder."""
    if raw is None:
        return None
    text = os.fspath(raw) if isinstance(raw, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{raw!r} is not a path. Allowed: the path of a folder, or none.")
    return None if text.strip().lower() == "none" else os.path.abspath(os.path.expanduser(text))


def _mode(raw: object) -> str | None:
    """Parses the name of an Inductor mode, unchecked, since modes depend on the running torch; None or "none" for no mode."""
    if raw is None:
        return None
    if not isinstance(raw, str) or not raw.strip():
        raise ConfigError(f"{raw!r} is not a mode. Allowed: the name of an Inductor mode, or none.")
    name = raw.strip().lower()
    return None if name == "none" else name


def takes_settings(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns `function`, which has an argument for each setting, with a ConfigError and a suggestion for any other name."""
    named: Callable[..., _T] = function

    @functools.wraps(function)
    def checked(*values: _P.args, **settings: _P.kwargs) -> _T:
        return named(*values, **split_options(settings, ())[0])

    return checked


def _made_of_settings(of: type[_T]) -> type[_T]:
    """Returns the dataclass, whose construction is as that of `takes_settings`."""
    of.__init__ = takes_settings(of.__init__)  # type: ignore[method-assign]
    return of


@_made_of_settings
@dataclass(frozen=True)
class RematConfig:
    """Every setting, parsed. Values are given as a user writes them: `RematConfig(memory_budget="8GiB")` works.

    Attributes:
        memory_budget: the limit of the region peak: bytes, a fraction, `min`, `max` or `auto` (default, unless torch's own
            `activation_memory_budget` is set).
        device: `detect` (default), a name of the device table, or a JSON file of measured figures.
        capacity: bytes that this process may hold on the device, or None for the device's own capacity, which a CPU lacks.
        reserve: bytes or percentage of the capacity that stay free under `auto` (default 5%).
        optimizer_state: memory that the optimizer still allocates before the second step (default `adamw`).
        instances: number of times that a compiled graph runs in a step; None (`learn`, the default) counts them in the first step.
        cost_model: `roofline` (default), `profile` (operators are timed on this device before a graph is planned, and kept in
            a file) or `unit` (every operator costs 1).
        compiler: `inductor` (default) or `eager`, which runs the two FX graphs as they are.
        mode: an Inductor mode, or None.
        check: compare the first step of each graph with the plan that recomputes nothing.
        time_limit: work of one search for a plan, in seconds of a small server's core; these are counted (7 million units each,
            see `passes/problem/work_budget.py`) and not timed, so that the plan is the same everywhere; None for a limit by the
            size of the graph.  A wall-clock deadline is the safety net, see `planning/deadline.py`.
        gradients: `end` (default): a backward returns all gradients when it ends; `early`: each gradient is accumulated into
            `.grad`, and the post-accumulate hooks run, when the gradient is made.
        oom_retry: number of times that a graph that runs out of memory is planned again, 0 to 3 (default 1).
        slices: number of slices in which the rows of the largest temporaries are computed: `off` (default), `auto` for as many as
            the budget needs, or a number.
        offload: `off` (default) or `auto`: saved tensors wait in host memory where that is faster than to recompute them.
        host_memory: bytes, or a percentage of the host's free memory (default 25%) that `offload` may take; of a percentage,
            each process of a node takes its part.
        inputs: `as_plain` (default): the backward reads from outside of its graph only the tensors that plain torch.compile's
            backward reads; `constant`: no tensor that the graph reads from outside changes until its backward has run.
        joint_passes: callables that rewrite the joint graph before it is planned, or None; each is called with that FX graph,
            and its `uuid()` is its identity in caches.  No environment variable can hold one.
        narrow: does nothing and goes with the next version; `off` (default) or, with a warning, `auto`, which saved bools as bits.
        rank_timeout: seconds for which a rank waits for the others at the first plan of a graph (default 60); 0 lets ranks plan
            on their own.
        report_dir: a folder for one report per compiled graph, or None.
        plan_dir: a folder of plans, written if absent and replayed if present, or None.
        log: level of the logger `compile_remat`: `warning`, `info` or `debug`; None (default) leaves the logger as it is,
            which is `warning` unless the user set it.

    Examples:
        >>> config = compile_remat.RematConfig(memory_budget="8GiB", slices=4)
        >>> config.memory_budget.value, config.slices, config.oom_retry
        (8589934592, 4, 1)
        >>> compiled = torch.compile(torch.nn.Linear(8, 8), backend="remat", options=config)
    """

    memory_budget: MemoryBudget = _row(MemoryBudget.parse, MemoryBudget("auto", is_given=False))
    device: str = _row(_device, "detect")
    capacity: int | None = _row(_capacity, None)
    reserve: Reserve = _row(Reserve.parse, Reserve("percent", 5))
    optimizer_state: OptimizerState = _row(OptimizerState.parse, OptimizerState("adamw"))
    instances: int | None = _row(_instances, None)
    cost_model: str = _row(_choice("roofline", "profile", "unit"), "roofline")
    compiler: str = _row(_choice("inductor", "eager"), "inductor")
    mode: str | None = _row(_mode, None)
    check: bool = _row(_switch, False)
    time_limit: float | None = _row(_seconds, None)
    gradients: str = _row(_choice("end", "early"), "end")
    oom_retry: int = _row(_up_to(3), 1)
    slices: str | int = _row(_slices, cast("str | int", "off"))
    offload: str = _row(_choice("off", "auto"), "off")
    host_memory: Reserve = _row(Reserve.parse, Reserve("percent", 25))
    inputs: str = _row(_choice("as_plain", "constant"), "as_plain")
    joint_passes: tuple[UserPass, ...] | None = _row(_passes, cast("tuple[UserPass, ...] | None", None))
    narrow: str = _row(_choice("off", "auto"), "off")
    rank_timeout: int = _row(_timeout, 60)
    report_dir: str | None = _row(_folder, None)
    plan_dir: str | None = _row(_folder, None)
    log: str | None = _row(_log_level, None)

    def __post_init__(self) -> None:
        for row in fields(self):
            value = _parse(row, getattr(self, row.name), "an argument of RematConfig")
            object.__setattr__(self, row.name, value)

    @classmethod
    def resolve(
        cls,
        options: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        *,
        modes: Collection[str] | None = None,
    ) -> Self:
        """Returns the settings: options beat the environment, which beats defaults; raises ConfigError for an invalid one.

        Args:
            modes: The Inductor modes to accept; None to accept any name.
        """
        options = {_attribute(name): value for name, value in (options or {}).items()}
        environ = os.environ if environ is None else environ
        split_options(options, ())
        for name in environ:
            if name.startswith(ENV_PREFIX) and name not in _variables():
                warn_unknown_variable(name)
        values = {row.name: _lookup(row, options, environ) for row in fields(cls)}
        config = cls(**{name: value for name, (value, _) in values.items() if value is not None})
        if modes is not None and config.mode is not None and config.mode not in modes:
            hint = did_you_mean(config.mode, modes)
            problem = f"no such mode. Allowed: {', '.join(sorted(modes))}.{hint}"
            raise ConfigError(f"mode = {config.mode!r} (from {values['mode'][1]}): {problem}")
        if config.narrow != "off":
            warn(f"narrow = {config.narrow} (from {values['narrow'][1]}) {NARROW_IS_GONE}")
        return config

    def as_options(self) -> dict[str, object]:
        """Returns the fields that differ from their defaults, as the dict that torch.compile takes.

        For a field at its default, the environment variable holds, as for a setting that is not given.
        """
        values = {row.name: (getattr(self, row.name), row.default) for row in fields(self)}
        is_given = {
            name: value != default or getattr(value, "is_given", False) for name, (value, default) in values.items()
        }
        return {name: value for name, (value, _) in values.items() if is_given[name]}


def split_options(
    options: Mapping[str, object], inductor_keys: Collection[str]
) -> tuple[dict[str, object], dict[str, object]]:
    """Splits options into our settings and Inductor's options; raises ConfigError, with suggestions, for any other key.

    As in torch.compile, `-` in a key reads as `_`. A key that both sides have is ours.
    """
    own: dict[str, object] = {}
    inductor: dict[str, object] = {}
    for key, value in options.items():
        name = _attribute(key)
        if name in _names():
            own[name] = value
        elif name in inductor_keys:
            inductor[name] = value
        else:
            raise ConfigError(_unknown_option(key, inductor_keys))
    return own, inductor


def _unknown_option(key: str, inductor_keys: Collection[str]) -> str:
    near = [f'"{name}"' for name in [closest(key, _names())] if name]
    near += [f'"{name}" (Inductor)' for name in [closest(key, inductor_keys)] if name]
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    allowed = ", ".join(_names()) + (", or any option of Inductor" if inductor_keys else "")
    return f"{key!r} is not an option of the backend remat. Allowed: {allowed}.{hint}"


def _lookup(row: Field[Any], options: Mapping[str, object], environ: Mapping[str, str]) -> tuple[Any, str]:
    """Returns the parsed value of one setting and its origin in words; (None, "") if it was not given."""
    variable = ENV_PREFIX + row.name.upper()
    origin, raw = f"the option {row.name!r}", options.get(row.name)
    if raw is None:
        origin, raw = f"the environment variable {variable}", environ.get(variable, "").strip() or None
    return (None, "") if raw is None else (_parse(row, raw, origin), origin)


def parsed(name: str, raw: object, origin: str) -> Any:
    """Returns the parsed value of one setting that is not from the options; a ConfigError names `origin`."""
    return _parse(next(row for row in fields(RematConfig) if row.name == name), raw, origin)


def _parse(row: Field[Any], raw: object, origin: str) -> Any:
    try:
        value = row.metadata["parse"](raw)
    except ConfigError as error:
        raise ConfigError(f"{row.name} = {raw!r} (from {origin}): {error}") from None
    if isinstance(value, MemoryBudget) and value.is_given and not value.origin:
        return replace(value, origin=origin)
    return value


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(row.name for row in fields(RematConfig))


@functools.cache
def _variables() -> frozenset[str]:
    return frozenset(ENV_PREFIX + name.upper() for name in _names())


@functools.cache  # warns once for each name, however many graphs a process compiles
def warn_unknown_variable(name: str) -> None:
    _LOG.warning("environment variable %s is not a setting and is ignored.%s", name, did_you_mean(name, _variables()))


def _attribute(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"option names are strings, not {key!r}.")
    return key.replace("-", "_")
