"""Names, values and types of Inductor's options, and the options behind its modes.

Private names of torch, 2.11 to 2.15: ``torch._inductor.config`` and ``torch._inductor.list_mode_options``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, get_origin

from torch._inductor import config, list_mode_options


def inductor_option_names() -> tuple[str, ...]:
    """Names of Inductor's own options, as ``torch.compile(options=...)`` accepts them."""
    return tuple(sorted(config.get_config_copy()))


def inductor_option_problem(name: str, value: object) -> str:
    """The error in a value for one of Inductor's options, by torch.compile's own test; empty if there is none."""
    get_type: Any = getattr(config, "get_type")  # noqa: B009 - the module is made at run time
    wanted = get_type(name)
    if get_origin(wanted) is None and not isinstance(value, wanted):
        return f"{value!r} is not of type {getattr(wanted, '__name__', wanted)}"
    return ""


def inductor_option(name: str, patches: Mapping[str, Any]) -> Any:
    """The value of an option in force: the one in `patches`, or else Inductor's process-wide value."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part, None)
    return patches.get(name, value)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor options that a ``mode`` of torch.compile sets; ``None`` and ``"default"`` set none."""
    if mode is None or mode == "default":
        return {}
    return dict(list_mode_options(mode))


def mode_names() -> tuple[str, ...]:
    """The modes that torch.compile knows."""
    return ("default", *sorted(m for m in list_mode_options() if m != "default"))


@contextmanager
def compiling_alone() -> Iterator[None]:
    """Runs Inductor without its pool of compile processes: starting the pool takes longer than compiling a few small kernels."""
    with config.patch(compile_threads=1):
        yield
