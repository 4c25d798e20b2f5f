"""torch.compile under a memory budget: `torch.compile(model, backend="remat")`."""

from pathlib import Path

# In a checkout, `passes` and `cost_models` lie beside this folder: let `compile_remat.passes` find them there.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))

from compile_remat.api import explain, install, pareto, plan, uninstall  # noqa: E402
from compile_remat.config import RematConfig  # noqa: E402
from compile_remat.errors import (  # noqa: E402
    BudgetError,
    CheckError,
    CheckWarning,
    ConfigError,
    DeviceError,
    PlanMismatchError,
    PlannerWarning,
    RematError,
)  # fmt: skip
from compile_remat.partitioner import partition  # noqa: E402
from compile_remat.report import Report, reports, reset_reports  # noqa: E402

__all__ = [
    "BudgetError", "CheckError", "CheckWarning", "ConfigError", "DeviceError", "PlanMismatchError", "PlannerWarning",
    "RematConfig", "RematError", "Report", "explain", "install", "pareto", "partition", "plan", "reports",
    "reset_reports", "uninstall",
]  # fmt: skip
