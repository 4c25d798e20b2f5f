"""Plans pinned in a folder (`plan_dir`): written if absent, replayed if present."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path

from compile_remat._util.atomic_write import write_atomically
from compile_remat._util.units import in_one_unit
from compile_remat.errors import PlanMismatchError, warn, warn_unwritable
from compile_remat.passes import Plan, Planner, PlanOption, Problem, Status
from compile_remat.passes.problem.constant_inputs import has_snapshots, without_snapshots
from compile_remat.passes.problem.tags import MUST, obeying
from compile_remat.planning.budget_source import EffectiveBudget
from compile_remat.planning.request import ChosenPlan

DELETE = "Delete it to have a new plan written."


def _plan_path(key: str, plan_dir: str | None) -> Path | None:
    return None if plan_dir is None else Path(plan_dir) / f"{key}.plan.json"


@dataclass(frozen=True)
class PinnedPlan:
    """A plan that was read from a file."""

    path: Path
    plan: Plan


class PinnedInSlices(PlanMismatchError):
    """The file of a graph holds a plan with rows in slices, so the plan belongs to the sliced form of that graph.

    Attributes:
        pinned: The plan.
        effective: The budget of the graph.
        plain: Plain torch.compile's plan option for the graph; None if it was not computed.
    """

    def __init__(self, pinned: PinnedPlan, effective: EffectiveBudget, plain: PlanOption | None) -> None:
        super().__init__(
            f"{pinned.path} holds a plan with rows in slices ({pinned.plan.slices_text}), but slices = off. "
            "Set slices, or delete the file to have a new plan written."
        )
        self.pinned, self.effective, self.plain = pinned, effective, plain


def stored_plan(key: str, plan_dir: str | None) -> PinnedPlan | None:
    """Returns the plan that was pinned for a graph; None if there is none.

    Raises:
        PlanMismatchError: The file cannot be read, or is of another version.
    """
    path = _plan_path(key, plan_dir)
    if path is None:
        return None
    try:
        return PinnedPlan(path, Plan.from_json(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise PlanMismatchError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise PlanMismatchError(f"{path} is not a plan of this version: {error}. {DELETE}") from None


def note_plan_of_constant_inputs(problem: Problem, plan_dir: str | None) -> None:
    """Warn if a plan is pinned for the same graph under `inputs="constant"`: that plan is not replayed."""
    if plan_dir is None or not has_snapshots(problem):
        return
    path = _plan_path(without_snapshots(problem).key(), plan_dir)
    if path is not None and os.path.exists(path):  # `Path.exists` raises if the name is too long
        warn(
            f'{path} is not replayed: it was made under inputs="constant", and its backward may read inputs that change before '
            'that backward runs. Set inputs="constant" to go on with it, or delete it; '
            f"a new plan is written to {problem.key()}.plan.json."
        )


def fitted(planner: Planner, pinned: PinnedPlan, budget_bytes: int | None) -> ChosenPlan:
    """Returns a pinned plan for its graph: same saved and recomputed values, with figures computed anew.

    Warns if the plan exceeds the budget.

    Raises:
        PlanMismatchError: The plan belongs to another graph, or does not fit this one.
    """
    key, path, stored = planner.problem.key(), pinned.path, pinned.plan
    if stored.problem_key != key:
        raise PlanMismatchError(
            f"{path} holds the plan of graph {stored.problem_key}, but this graph is {key}: the model, its sizes, the "
            f"device's figures or the version changed. {DELETE}"
        )
    try:
        lenient = planner.on(obeying(planner.problem, MUST))  # a stored plan may have set aside the PREFER tags
        plan = lenient.plan_of(lenient.mask_of(stored.saved), budget_bytes, _again_of(stored))
    except KeyError as error:
        raise PlanMismatchError(f"{path} saves {error}, which this graph does not have. {DELETE}") from None
    except ValueError as error:
        raise PlanMismatchError(f"{path} does not fit this graph: {error}. {DELETE}") from None
    plan = replace(
        plan,
        problem_key=key,
        status=Status.REPLAYED,
        written=stored.written,
        offloaded=stored.offloaded,
        offloaded_bytes=stored.offloaded_bytes,
        host_bytes=stored.host_bytes,
        link_bytes=stored.link_bytes,
        stall_time_ns=stored.stall_time_ns,
    )
    if budget_bytes is None or plan.is_feasible:
        return ChosenPlan(plan)
    peak, budget = in_one_unit(plan.peak_bytes, budget_bytes)
    message = (
        f"the pinned plan {path} has a predicted peak of {peak}, above the budget of {budget}; "
        "delete it to have a new plan written"
    )
    warn(message)
    return ChosenPlan(plan, message=message)


def keeping_all(pinned: PinnedPlan) -> PinnedPlan:
    """Returns the pinned plan with all that it moves to the host kept on the device."""
    kept = replace(pinned.plan, offloaded=(), offloaded_bytes=0, host_bytes=0, link_bytes=0, stall_time_ns=0)
    return replace(pinned, plan=kept)


def _again_of(stored: Plan) -> tuple[str, ...]:
    """Returns the values with a second recompute; raises ValueError if the plan also saves one of them."""
    if both := sorted(set(stored.again) & set(stored.saved)):
        raise ValueError(f"it computes {both[0]} a second time and saves it")
    return stored.again


def store_plan(plan: Plan, plan_dir: str | None, key: str = "") -> None:
    """Write a plan to `plan_dir`; warns if it cannot be written.

    Args:
        key: The key of the whole graph if the plan is for its sliced form; empty for the plan's own key.
    """
    path = _plan_path(key or plan.problem_key, plan_dir)
    if path is None:
        return
    try:
        write_atomically(path, plan.to_json() + "\n")
    except OSError as error:
        warn_unwritable("plan_dir", str(path.parent), error, "and the next process plans again")
