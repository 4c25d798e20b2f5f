"""torch.compile under a memory budget: `torch.compile(model, backend="remat")`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_remat.checkout import find_packages_beside

if TYPE_CHECKING:
    from compile_remat.api import *  # noqa: F403

find_packages_beside(Path(__file__).resolve().parent)

__all__ = [  # noqa: F405
    "BudgetError", "CheckError", "CheckWarning", "ConfigError", "DeviceError", "GradientError", "InputChangedError", "LiveBuffer",
    "MaxBatch", "MeasuredStep", "MissingExtraError", "Offloaded", "PassError", "Plan", "PlanMismatchError", "PlanOption",
    "PlannerWarning", "RankError", "RankForecast", "RankGraph", "RematConfig", "RematError", "Report", "Reports",
    "SettingWarning", "SharedBudgetError", "SizeRange", "SlicedProduct", "Status", "StepMoment", "TagConflictError", "explain",
    "install", "largest_batch", "measured_step", "options", "pareto", "partition", "plan", "plan_rank", "reports",
    "reset_reports", "uninstall",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        """Import the public names when one is first used, so that `compile-remat --help` need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from compile_remat import api

        return getattr(api, name)
