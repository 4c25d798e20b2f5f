"""All state that this package keeps in the process, outside of the callables that `torch.compile` made.

    where                                     what                                     cleared
    report._REPORTS                           reports of the graphs compiled so far    yes; alone by `reset_reports()`
    runtime.shared_budget._BUDGETS            shared budgets, by device and setting    yes
    planning.plain_peaks._LARGEST             largest plain peak, by device            yes
    _util.user_warnings._SAID, _COMPILED_AT   warnings given once, their last place    yes
    _util.user_warnings._HELD                 context variable                         ends with its `with` block
    config.warn_unknown_variable              warnings given once                      yes
    report._FOLDER                            folder of reports under `install`        by `uninstall()`
    inductor.install._replaced                what Inductor had before `install`       by `uninstall()`, which gives it back
    ranks.board._BOARDS                       what the ranks of a group said           goes with its process group
    compilation.driver._REGIONS               number of the next region                no: numbers only tell regions apart
    runtime.early_gradients._WAITING          calls that wait for their backward       weak keys: dropped with the call
    runtime.peak_monitor.PeakMonitor          forwards begun so far                    no: only differences count
    report._RECORDED, report._FIELDS          context variables                        end with their `with` block
    _torch.sizes._BOUND, peak_monitor._STEP   context variables                        end with their `with` block
    inductor.light_code.reading._kernels      context variable                         is reset where it was set
    inductor.cpp_kernels.building._functions  kernels that were loaded, by their code  no: equal code is equal
    inductor.cpp_kernels.unit.Unit.cache      the libraries that they are in           no: equal code is equal
    inductor.fusion_guard._orders             schedules of Inductor, weakly            go with their scheduler
    _torch.offload.offload_ops._transfers     copies between device and host, weakly   go with their tickets
    _torch.offload.offload_ops._serials       number of the next copy                  no: numbers only tell copies apart
    _torch.offload.streams._STREAMS           copy engines, by kind of device          no: they hold nothing between copies
    planning.settings._failed_copies          a copy to the host has failed            yes
    _torch.offload.host_memory.MAPPED         blocks of host memory                    yes; those that tensors hold stay

The table leaves out values that are computed once and never change: hash of the sources, names of settings and types, rules of
the installed Inductor, workspaces of kernels.  Two objects of torch carry state that lives as long as they do
(`_torch.autograd_node`): the class of a compiled graph, its original backward, and an autograd node, the handle of its call.
"""

from __future__ import annotations

from compile_remat import config
from compile_remat._torch.offload.host_memory import MAPPED
from compile_remat._util.user_warnings import forget_warnings
from compile_remat.planning.plain_peaks import forget_plain_peaks
from compile_remat.planning.settings import allow_offload
from compile_remat.report import reset_reports
from compile_remat.runtime.shared_budget import clear_budgets


def clear_process_state() -> None:
    """Clear the state that earlier compilations left, as in a new process; compiled callables keep their own state.

    `install` stays in force: `uninstall` undoes it.
    """
    reset_reports()
    clear_budgets()
    forget_plain_peaks()
    forget_warnings()
    MAPPED.drop_free()
    allow_offload()
    config.warn_unknown_variable.cache_clear()
