"""The public names, gathered here so that `compile_remat` itself can wait for the first use of one (and with it, torch)."""

from compile_remat.api import explain as explain
from compile_remat.api import install as install
from compile_remat.api import pareto as pareto
from compile_remat.api import plan as plan
from compile_remat.api import uninstall as uninstall
from compile_remat.config import RematConfig as RematConfig
from compile_remat.errors import BudgetError as BudgetError
from compile_remat.errors import CheckError as CheckError
from compile_remat.errors import CheckWarning as CheckWarning
from compile_remat.errors import ConfigError as ConfigError
from compile_remat.errors import DeviceError as DeviceError
from compile_remat.errors import PlanMismatchError as PlanMismatchError
from compile_remat.errors import PlannerWarning as PlannerWarning
from compile_remat.errors import RematError as RematError
from compile_remat.errors import SettingWarning as SettingWarning
from compile_remat.errors import SharedBudgetError as SharedBudgetError
from compile_remat.errors import TagConflictError as TagConflictError
from compile_remat.planning.joint_split import partition as partition
from compile_remat.report import Report as Report
from compile_remat.report import reports as reports
from compile_remat.report import reset_reports as reset_reports
from compile_remat.runtime.peak_monitor import MeasuredStep as MeasuredStep
from compile_remat.runtime.peak_monitor import measured_step as measured_step
