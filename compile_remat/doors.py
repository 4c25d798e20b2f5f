"""The settings that a function of the public interface leaves aside; whoever passes one of them to it gets a warning."""

from __future__ import annotations

from collections.abc import Iterable

from compile_remat.errors import SettingWarning, warn

RUNS_NO_STEP = dict.fromkeys(
    ("check", "instances", "oom_retry", "rank_timeout", "report_dir"), "no training step runs in it"
)
WITHOUT_DEVICE = RUNS_NO_STEP | dict.fromkeys(
    ("compiler", "joint_passes", "mode", "plan_dir"), "it plans for a device that need not be here"
)

OFFLOAD = ("offload", "host_memory")

LEFT_ASIDE = {
    "explain": RUNS_NO_STEP,
    "plan": RUNS_NO_STEP,
    "pareto": RUNS_NO_STEP
    | dict.fromkeys(
        ("memory_budget", "capacity", "reserve", "optimizer_state", "plan_dir"), "it shows plans for every budget"
    )
    | {"slices": "its plans are of the whole graph", "compiler": "its plans are not lowered"},
    "plan by name": WITHOUT_DEVICE,
    "largest_batch": WITHOUT_DEVICE
    | {"memory_budget": "it takes all that the device has left", "slices": "it plans whole graphs"}
    | dict.fromkeys(OFFLOAD, "its plans keep all saved tensors on the device"),
    "plan_rank": WITHOUT_DEVICE
    | {"slices": "it plans whole graphs", "gradients": "its gradients leave at the backward's end"},
    "install": {
        "instances": "each graph has the whole budget for itself",
        "oom_retry": "a step that runs out of memory does not run again",
        "rank_timeout": "each rank plans on its own",
        "compiler": "Inductor compiles",
        "mode": "Inductor's own settings hold",
    },
}
"""For each function, the settings that do nothing in it, with the reason; a test walks all settings through all functions.
`install` warns of `check` and `gradients` by itself, as they may come from the environment."""


def warn_of_settings_left_aside(function: str, names: Iterable[str]) -> None:
    """Issue a `SettingWarning` for each given setting that `function` leaves aside.

    Args:
        function: A key of `LEFT_ASIDE`.
        names: The names of the settings that the caller passed; those from the environment are not the function's own.
    """
    for name in names:
        reason = LEFT_ASIDE[function].get(name.replace("-", "_"))
        if reason is not None:
            warn(f"{name} does nothing in {function}: {reason}", SettingWarning)
