"""The scripts of `examples/` run at toy size, and the pass of `own_policy` on a graph that can be read."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

import compile_remat
from tests.passes.joint import check_rewrite, joint_in_backend

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@contextmanager
def example(name: str) -> Iterator[Any]:
    """The script as a module, importable by its own name while it runs, as `plan` needs it."""
    module_name = f"example_{name}"
    spec = importlib.util.spec_from_file_location(module_name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[module_name]


pytestmark = pytest.mark.usefixtures("fresh")


def test_every_example_is_run_here() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == [
        "own_policy", "plan", "ranks", "train", "training_loops",
    ]  # fmt: skip
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == ["first_steps"]


@pytest.mark.proof
def test_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with example("train") as script:
        losses = script.main(["--device", "cpu", "--toy", "--compiler", "eager", "--budget", "1MiB", "--steps", "3"])
    assert len(losses) == 3
    (report,) = compile_remat.reports()
    assert report.predicted_peak_bytes is not None
    assert report.predicted_peak_bytes <= 1 << 20
    assert "predicted peak" in capsys.readouterr().out


def test_training_loop_goes_on_at_the_lowest_peak() -> None:
    """A budget below the lowest reachable peak: the script takes the error's figure."""
    with example("train") as script:
        arguments = ["--device", "cpu", "--toy", "--compiler", "eager", "--budget", "1MiB", "--steps", "2"]
        assert len(script.main(arguments)) == 2
    assert compile_remat.reports()[-1].plan is not None


# -- training_loops ---------------------------------------------------------------------------------------------------


def tables(script: Any, name: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The rows of a table at toy size, without the heads."""
    script.WIDTH, script.BLOCKS, script.ROWS = 64, 3, 2048
    script.PLAIN, script.COMPILER = "aot_eager_decomp_partition", "eager"
    script.main([name])
    _, _, *rows = capsys.readouterr().out.strip().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.full
def test_micro_batches_add_their_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    with example("training_loops") as script:
        whole, one, two, four = tables(script, "accumulation", capsys)
    assert [row[0] for row in (whole, one, two, four)] == [
        "1 of 2048 rows", "1 of 512 rows", "2 of 512 rows", "4 of 512 rows",
    ]  # fmt: skip
    gradients = float(two[3])
    assert gradients > 0 == float(one[3])
    assert float(two[2]) == pytest.approx(float(one[2]) + gradients, abs=0.15) and four[1:] == two[1:]


@pytest.mark.full
def test_adapters_have_small_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    with example("training_loops") as script:
        rows = tables(script, "lora", capsys)
        for everything, adapters in (rows[:2], rows[2:]):
            assert float(adapters[1]) < float(everything[1])
            assert float(adapters[4]) < float(adapters[2]) and float(everything[4]) < float(everything[2])


def test_a_step_after_an_evaluation_has_its_old_peak(capsys: pytest.CaptureFixture[str]) -> None:
    with example("training_loops") as script:
        for name, before, evaluation, after in tables(script, "evaluation", capsys):
            assert before == after and float(evaluation) < float(before), name


@pytest.mark.full
def test_a_run_resumes_under_another_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with example("training_loops") as script:
        whole, fast, low = tables(script, "resume", capsys)
    assert whole[1:4] == fast[1:4] == low[1:4]
    assert float(low[4]) < float(fast[4])


@pytest.mark.full
@pytest.mark.parametrize(
    ("table", "page"),
    [("accumulation", "gradient-accumulation"), ("lora", "lora"), ("evaluation", "evaluation"), ("resume", "resuming")],
)
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages name torch 2.13")
def test_tables_of_guides_are_what_the_script_prints(table: str, page: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXAMPLES / "training_loops.py"), table]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in (EXAMPLES.parent / f"docs/guides/{page}.md").read_text()


# -- the notebook -----------------------------------------------------------------------------------------------------


def cells(kind: str) -> list[str]:
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    assert notebook["nbformat"] == 4 and not any(cell.get("outputs") for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_of_python_and_prose() -> None:
    for number, cell in enumerate(cells("code")):
        compile(cell, f"cell {number}", "exec")
    assert cells("markdown")[0].startswith("# ") and all(cell.isascii() for cell in cells("markdown"))


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells("code")):
        exec(compile(cell, f"cell {number}", "exec"), names)
    peaks = [plan.peak_bytes for plan in names["plans"]]
    assert peaks == sorted(peaks, reverse=True)
    assert names["losses"][-1] < names["losses"][0]
    assert names["measured"].peak_bytes <= 30 << 20 and names["floor_bytes"] > 8 << 20
    assert "<svg" in names["report"]._repr_html_() or "<img" in names["report"]._repr_html_()
    assert "predicted 29.0 MiB of 30\nmeasured 29.0 MiB of 30" in capsys.readouterr().out


# -- plan, ranks, own_policy ------------------------------------------------------------------------------------------


def test_plans_for_a_device_that_is_not_there() -> None:
    with example("plan") as script:
        script.LAYERS, script.BUDGETS = 3, ("max", 0.8, "min")
        plans = script.main([])
    peaks = [plan.peak_bytes for plan in plans]
    times = [plan.extra_time_ns for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)


@pytest.mark.parametrize(("wrapper", "peers"), [pytest.param("ddp", 0, marks=pytest.mark.full), ("fsdp2", 1)])
def test_training_on_two_ranks(wrapper: str, peers: int) -> None:
    """Under FSDP2 the first block is a graph of its own: its input needs no gradient.  The budget is that of the step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "ranks.py"), "--wrapper", wrapper, "--budget", "2MiB", "--steps", "3"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"loss (\S+) -> (\S+)", done.stdout)[0])
    assert last < first
    assert ("runs 2 times in a step beside 1 other graph" in done.stdout) == bool(peers)
    peaks_mib = [float(mib) for mib in re.findall(r"(?:predicted|scheduled) peak \D*(\d+\.\d) MiB", done.stdout)]
    assert len(peaks_mib) == 2 + peers and max(peaks_mib) <= 2
    assert f"{wrapper} holds 0." in done.stdout


def test_own_pass_and_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with example("own_policy") as script:
        script.main(compiler="eager")
    out = capsys.readouterr().out
    assert "in the backend: 2 squares rewritten" in out
    assert "by hand: 2 squares rewritten" in out
    assert "own policy: saves mm, mm_1;" in out
    assert "gradients equal those of eager mode" in out


def test_squares_become_products() -> None:
    """The derivative of `pow` reads `x` too, so nothing else changes."""

    def square(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).pow(2)

    def rewrite(joint: fx.GraphModule) -> int:
        squares(joint.graph)
        joint.recompile()
        return int(squares.count)

    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    with example("own_policy") as script:
        squares = script.SquaresAsProducts()
        done = check_rewrite(joint_in_backend(square, x, w), rewrite)
    assert done.result == 1
    assert_expected_inline(
        done.before,
        """\
mm: f32[4, 2] = aten.mm(primals_1, primals_2)
pow_1: f32[4, 2] = aten.pow(mm, 2)
pow_2: f32[4, 2] = aten.pow(mm, 1.0)
mul: f32[4, 2] = aten.mul(pow_2, 2.0)
mul_1: f32[4, 2] = aten.mul(tangents_1, mul)
permute: f32[3, 4] = aten.permute(primals_1, [1, 0])
mm_1: f32[3, 2] = aten.mm(permute, mul_1)
return pow_1, None, mm_1""",
    )
    assert_expected_inline(
        done.after,
        """\
mm: f32[4, 2] = aten.mm(primals_1, primals_2)
mul_tensor: f32[4, 2] = aten.mul(mm, mm)
pow_2: f32[4, 2] = aten.pow(mm, 1.0)
mul: f32[4, 2] = aten.mul(pow_2, 2.0)
mul_1: f32[4, 2] = aten.mul(tangents_1, mul)
permute: f32[3, 4] = aten.permute(primals_1, [1, 0])
mm_1: f32[3, 2] = aten.mm(permute, mul_1)
return mul_tensor, None, mm_1""",
    )
