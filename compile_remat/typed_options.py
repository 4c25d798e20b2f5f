"""The function `compile_remat.options`: settings with names, types and a line each, as the dict that torch.compile takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from compile_remat.config import parsed, takes_settings


@takes_settings
def options(
    *,
    memory_budget: Literal["auto", "min", "max"] | str | float | None = None,
    device: Literal["detect"] | str | os.PathLike[str] | None = None,
    capacity: str | int | None = None,
    reserve: str | int | None = None,
    optimizer_state: Literal["adamw", "sgd", "none"] | str | int | None = None,
    instances: Literal["learn"] | int | None = None,
    cost_model: Literal["roofline", "profile", "unit"] | None = None,
    compiler: Literal["inductor", "eager"] | None = None,
    mode: str | None = None,
    check: bool | None = None,
    time_limit: float | None = None,
    gradients: Literal["end", "early"] | None = None,
    oom_retry: int | None = None,
    slices: Literal["off", "auto"] | int | None = None,
    offload: Literal["off", "auto"] | None = None,
    host_memory: str | int | None = None,
    inputs: Literal["as_plain", "constant"] | None = None,
    joint_passes: Callable[[Any], object] | Sequence[Callable[[Any], object]] | None = None,
    narrow: Literal["off", "auto"] | None = None,
    rank_timeout: int | None = None,
    report_dir: str | os.PathLike[str] | None = None,
    plan_dir: str | os.PathLike[str] | None = None,
    log: Literal["warning", "info", "debug"] | None = None,
) -> dict[str, Any]:
    """Returns settings as the dict that ``torch.compile(model, backend="remat", options=...)`` takes.

    An editor completes the names, and a type checker refuses a wrong name or type, which it cannot do in a dict.  The result is a
    plain dict with the settings that were given, as they were given; options of Inductor are added with ``|``.  A setting that is
    None is left out: its environment variable holds, or its default.

    Args:
        memory_budget: The limit of a step's peak: a size ("20GiB"), bytes, a fraction of plain torch.compile's peak (0.5),
            "min", "max" or "auto" (the default: what the GPU has free).
        device: The device to plan for: "detect" (the default), a name of `compile-remat devices`, or a JSON file of `calibrate`.
        capacity: A size: what this process may hold on the device, for "auto"; by default all that a GPU has.
        reserve: A size, or a share of the capacity ("5%", the default), that stays free under "auto".
        optimizer_state: Memory that the optimizer will allocate, under "auto": "adamw" (the default), "sgd", "none" or a size.
        instances: Number of times that a compiled block runs in a step; "learn" (the default) counts them in the first step.
        cost_model: Times of operators: "roofline" (the default) estimates, "profile" measures, "unit" counts each as 1.
        compiler: "inductor" (the default), or "eager" to run the two graphs as they are, for debugging.
        mode: One of Inductor's modes, such as "reduce-overhead"; by default none.
        check: True to compare the first step with a plan that recomputes nothing.
        time_limit: Work of one search for a plan, in counted seconds; by default the graph's size decides.
        gradients: "end" (the default), or "early": each gradient leaves the backward when it is made, for hooks that free it.
        oom_retry: Number of times that a graph that runs out of memory is planned again, 0 to 3; by default 1.
        slices: Number of slices in which rows of huge temporaries are computed; "off" (the default) or "auto".
        offload: "off" (the default), or "auto": saved tensors wait in host memory where that is faster than to recompute them.
        host_memory: A size, or a share of the host's free memory ("25%", the default), for "offload".
        inputs: "as_plain" (the default), or "constant": no tensor that the graph reads changes until its backward has run.
        joint_passes: Passes of your own, each called with the joint ``fx.Graph`` before it is planned.
        narrow: Does nothing, and goes with the next version.
        rank_timeout: Seconds for which a rank waits for the others at the first plan of a graph; 0: for none.  By default 60.
        report_dir: A folder for one JSON report of each graph.
        plan_dir: A folder of plans, written where one is absent and replayed where it is present.
        log: Lowest level of the messages that the logger `compile_remat` shows; by default the logger is left as it is.

    Raises:
        ConfigError: A name or a value is invalid; the message names the setting and the allowed values, or the name that is meant.

    Examples:
        >>> compile_remat.options(memory_budget=0.5, report_dir="reports")
        {'memory_budget': 0.5, 'report_dir': 'reports'}
        >>> compile_remat.options(memory_budget="20GiB") | {"max_autotune": True}
        {'memory_budget': '20GiB', 'max_autotune': True}
        >>> compile_remat.options(memory_budget=20)
        Traceback (most recent call last):
        ...
        compile_remat.errors.ConfigError: memory_budget = 20 (from an argument of options): 20 has no unit; write "20MiB" ...
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name, value in given.items():
        parsed(name, value, "an argument of options")
    return given
