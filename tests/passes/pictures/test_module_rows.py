"""Rows of modules add up to the plan's own figures, and equal layers are one row."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from compile_remat.pages.figures import ModuleRow
from compile_remat.passes.memory.plan_timeline import candidate_of
from compile_remat.passes.pictures.module_rows import folded, ranges, rows_of_modules
from compile_remat.passes.problem.problem import Problem
from tests.oracles.random_problems import problems


def row(path: str, saved_bytes: int = 8) -> ModuleRow:
    return ModuleRow(path, 1, 1, saved_bytes, 0, 0, 0)


def test_equal_layers_are_one_row() -> None:
    rows = [*(row(f"layers.{k}.mlp.0") for k in (0, 1, 2, 5)), row("layers.3.mlp.0", 9), row("head")]
    found = {r.path: (r.modules, r.saved_bytes) for r in folded(rows)}
    assert found == {"layers.0-2,5.mlp.0": (4, 32), "layers.3.mlp.0": (1, 9), "head": (1, 8)}


def test_a_number_inside_of_a_name_is_no_layer() -> None:
    assert len(folded([row("conv1.weight"), row("conv2.weight")])) == 2


def test_ranges() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2,4,6-7"


@given(problems)
def test_rows_stand_in_the_order_in_which_the_model_runs(problem: Problem) -> None:
    values = tuple(replace(v, origin=replace(v.origin, module_path=f"m{k}")) for k, v in enumerate(problem.values))
    found = candidate_of(replace(problem, values=values), [v.name for v in values if v.is_saveable], ())
    places = [int(r.path.removeprefix("m")) for r in rows_of_modules(found)]
    assert places == sorted(places) and len(places) >= int(found.batch.used.sum())


@given(problems, st.data())
def test_rows_add_up_to_the_plan(problem: Problem, data: st.DataObject) -> None:
    saveable = [v.name for v in problem.values if v.is_saveable]
    found = candidate_of(problem, data.draw(st.lists(st.sampled_from(saveable), unique=True)) if saveable else [], ())
    rows = rows_of_modules(found)
    batch = found.batch
    assert sum(r.saved_bytes for r in rows) == int(batch.saved_bytes[0])
    assert sum(r.num_recomputed for r in rows) == int(batch.recomputed.sum())
    assert sum(r.recompute_time_ns for r in rows) == int(found.simulator.time_ns @ batch.recomputed[:, 0])
