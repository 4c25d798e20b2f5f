"""One row of the zoo, in a process of its own: ``python -m benchmarks.zoo.child JSON``, with the row so far, prints the row.

Code is emitted and run dry; with `is_real` the model trains.
"""

import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import harness
from benchmarks.common.code_only import GraphCode, code_of_graphs, compile_code, plain_peaks_bytes, without_compiler
from benchmarks.common.compile_caches import private_compile_caches
from benchmarks.common.phases import REST, phases_timed
from benchmarks.common.torchvision_operators import declare_missing_operators
from benchmarks.models import Case
from benchmarks.models.building import in_dtype
from benchmarks.zoo import entry_of
from benchmarks.zoo.rows import ADVICE, FAILED, FLOOR, PLAIN, ZooRow

SEED = 0


def main(argv: Sequence[str] | None = None) -> int:
    (text,) = sys.argv[1:] if argv is None else argv
    torch.set_num_threads(1)
    declare_missing_operators()
    print(json.dumps(asdict(made(ZooRow.of(json.loads(text))))), flush=True)
    return 0


def made(row: ZooRow) -> ZooRow:
    """The row with its figures, or with the reason why there are none."""
    try:
        case = case_of(row)
    except Exception as error:
        return replace(row, **failure_of(error))
    parameters = [each for each in case.module.parameters() if each.requires_grad]
    row = replace(row, gradient_bytes=sum(each.nbytes for each in parameters))
    with warnings.catch_warnings(record=True) as caught, timed() as taken, code_of_graphs() as graphs:
        warnings.simplefilter("always")
        try:
            found = measured(row, case) if row.is_real else emitted(row, case, graphs)
        except Exception as error:
            found = failure_of(error)
    figures = figures_of(graphs) if row.setting != PLAIN else {}
    ours = (str(w.message) for w in caught if w.category.__module__.startswith("compile_remat"))
    return replace(row, **{**figures, **taken, **found, "warnings": tuple(dict.fromkeys(ours))})


def case_of(row: ZooRow) -> Case:
    """The model and its inputs, drawn from one seed."""
    torch.manual_seed(SEED)
    with warnings.catch_warnings(action="ignore"):  # warnings of the libraries
        module, inputs = in_dtype(entry_of(row.model).build(), row.dtype)
    return Case(row.model, module.train(), inputs, row.family)


def emitted(row: ZooRow, case: Case, graphs: list[GraphCode]) -> dict[str, Any]:
    """Fields of code that is emitted and run dry; `graphs` are those that were compiled so far."""
    with without_compiler():
        if row.setting == ADVICE:
            return advised(case, graphs)
        if row.setting == PLAIN:
            peaks = plain_peaks_bytes(case.module, case.inputs)
            return {"graphs": len(peaks), "emitted_bytes": tuple(peaks)}
        compile_code(case.module, case.inputs, f"{row.budget_bytes}B" if row.budget_bytes else row.setting)
    return {}


def advised(case: Case, graphs: list[GraphCode]) -> dict[str, Any]:
    """Fields of code within the budget that an error asks for, word for word, the first one being of a budget of one byte.

    Each graph may refuse once, as each has a floor of its own; a graph that refuses what it asked for itself is the answer.
    """
    from compile_remat.budget import MemoryBudget
    from compile_remat.errors import BudgetError

    budget, refused = "1B", set[str]()
    while True:
        graphs.clear()
        torch.compiler.reset()
        found: dict[str, Any] = {"budget_bytes": int(MemoryBudget.parse(budget).value or 0)}
        try:
            compile_code(case.module, case.inputs, budget)
        except BudgetError as error:
            if error.graph_key in refused:
                return {**found, **failure_of(error)}
            refused.add(error.graph_key)
            asked = re.search(r'set memory_budget to "([^"]+)"', str(error))
            assert asked is not None, str(error)
            budget = asked[1]
        else:
            return found


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Fields of the seconds that the body takes, complete at its end."""
    from compile_remat.partitioning import partitioner

    planning = {name: (partitioner, name) for name in ("split", "with_copies_in_backward")}
    found: dict[str, float] = {}
    start = time.perf_counter()
    with phases_timed(planning) as spent:
        yield found
    found["wall_s"] = round(time.perf_counter() - start, 2)
    found["cpu_s"] = round(sum(spent.values()), 2)
    found["planning_cpu_s"] = round(sum(s for phase, s in spent.items() if phase != REST), 2)


def figures_of(graphs: Sequence[GraphCode]) -> dict[str, Any]:
    """Fields of the graphs that have a backward."""
    trained = [graph for graph in graphs if graph.trains]
    reports = [report for graph in trained for report in graph.reports]
    plans = [report.plan for report in reports if report.plan is not None]
    return {
        "graphs": len(trained),
        "predicted_bytes": tuple(_predicted_bytes(graph) for graph in trained),
        "emitted_bytes": tuple(graph.emitted_bytes for graph in trained),
        "failure": "; ".join(dict.fromkeys(graph.problem for graph in trained if graph.rounds and graph.problem)),
        "observed_bytes": tuple(_observed_bytes(graph) for graph in trained),
        "rounds": tuple(graph.reports[-1].rounds if graph.reports else graph.rounds for graph in trained),
        "statuses": tuple("NOT_PLANNED" if each.plan is None else each.plan.status.name for each in reports),
        "extra_ns": sum(plan.extra_time_ns for plan in plans) if plans else None,
        "step_ns": sum(plan.once_time_ns for plan in plans) if plans else None,
    }


def _predicted_bytes(graph: GraphCode) -> int | None:
    return graph.reports[-1].predicted_peak_bytes if graph.reports else None


def _observed_bytes(graph: GraphCode) -> int | None:
    return graph.reports[-1].observed_peak_bytes if graph.reports else None


def failure_of(error: Exception) -> dict[str, Any]:
    """Fields of an error: a BudgetError is an answer, its floor."""
    from compile_remat.errors import BudgetError, find_error

    refused = find_error(error, BudgetError)
    if refused is not None:
        return {"outcome": FLOOR, "floor_bytes": int(refused.floor_bytes)}
    return {"outcome": FAILED, "failure": harness.reason_of(error)}


# -- training -----------------------------------------------------------------------------------------------------------


def measured(row: ZooRow, case: Case) -> dict[str, Any]:
    """Fields of a step that really runs."""
    with private_compile_caches():
        run = harness.plain(case) if row.setting == PLAIN else harness.remat(case, row.budget_bytes or row.setting)
        seeded(run.clear_and_step)
        gradients = gradients_of(case.module)
        peak = harness.second_step_peak(run, "cpu")
        reference, expected = reference_of(row, case)
    return {
        "measured_bytes": peak.peak_bytes,
        "reference": reference,
        "gradient_error": None if expected is None else gradient_error(gradients, expected),
    }


def reference_of(row: ZooRow, case: Case) -> tuple[str, dict[str, Tensor] | None]:
    """The name of the reference and its gradients: eager mode's where two seeds give equal ones, else plain torch.compile's."""
    eager = harness.Training(case.module, case.module, case.inputs)
    seeded(eager.clear_and_step)
    expected = gradients_of(case.module)
    seeded(eager.clear_and_step, SEED + 1)
    again = gradients_of(case.module)
    if gradient_error(again, expected) < 1e-6:
        return "eager", expected
    if row.setting == PLAIN:
        return "", None
    seeded(harness.plain_again(case).clear_and_step)
    return PLAIN, gradients_of(case.module)


def seeded(step: Callable[[], None], seed: int = SEED) -> None:
    """A step that draws the numbers of a seed."""
    torch.manual_seed(seed)
    step()


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients, by parameter."""
    return {name: p.grad.to_dense().clone() for name, p in module.named_parameters() if p.grad is not None}


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, over the largest value of any; infinite where one is missing or not finite."""
    if found.keys() != expected.keys():
        return float("inf")
    scale = max((float(each.abs().max()) for each in expected.values()), default=0.0) or 1.0
    differences = [float((found[name] - expected[name]).abs().max()) / scale for name in expected]
    return max((each if each == each else float("inf") for each in differences), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
