"""torch.compile under a memory budget: `torch.compile(model, backend="remat")`."""

from pathlib import Path

# In a checkout, `passes` and `cost_models` lie beside this folder: let `compile_remat.passes` find them there.
_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file():
    __path__.append(str(_ROOT))

from compile_remat.config import RematConfig as RematConfig  # noqa: E402
from compile_remat.errors import BudgetError as BudgetError  # noqa: E402
from compile_remat.errors import ConfigError as ConfigError  # noqa: E402
from compile_remat.errors import DeviceError as DeviceError  # noqa: E402
from compile_remat.errors import PlanMismatchError as PlanMismatchError  # noqa: E402
from compile_remat.errors import PlannerWarning as PlannerWarning  # noqa: E402
from compile_remat.errors import RematError as RematError  # noqa: E402

__all__ = [
    "BudgetError",
    "ConfigError",
    "DeviceError",
    "PlanMismatchError",
    "PlannerWarning",
    "RematConfig",
    "RematError",
]
