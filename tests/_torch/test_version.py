"""Supported versions of torch, and the fallback under others: a warning and plain Inductor, at every entry point."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func

import compile_remat
from compile_remat import PlannerWarning, RematError
from compile_remat._torch import version
from compile_remat._torch.version import MissingName, private_module, private_name, version_problem
from compile_remat.backend import remat
from compile_remat.cli import doctor

ROOT = Path(compile_remat.__file__).resolve().parent.parent
SUPPORTED = ["2.11.0", "2.11.0a0+gitabc123", "2.13", "2.13.0+cpu", "2.14.1+cu130", "2.15.0.dev20260101", "2.15.1.post2"]
OTHERS = [
    "2.10.0+cu128",
    "2.16.0",
    "2.16.0a0+git123",
    "2.16rc1",
    "3.0.0a0+git1",
    "1.13.1",
    "20.11.0",
    "2",
    "",
    "unknown",
]


pytestmark = pytest.mark.usefixtures("fresh")


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.randn(16, 8)


def gradients(model: torch.nn.Module, call: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    call(x).sin().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


# -- the range --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", SUPPORTED)
def test_versions_inside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert version_problem() == ""


@pytest.mark.parametrize("version", OTHERS)
def test_versions_outside_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    is_newer = version.startswith(("2.16", "3", "20"))
    cure = "upgrade compile-remat, or install torch 2.15" if is_newer else "install torch 2.11 or newer"
    assert version_problem() == f"compile_remat supports torch 2.11 to 2.15, not {version} ({cure})"


def test_the_torch_that_runs_is_supported() -> None:
    assert version_problem() == ""


def test_the_range_is_the_one_that_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (first, low), (last, end) = version.SUPPORTED
    assert f"torch>={first}.{low},<{last}.{end}" in project["dependencies"]


# -- every entrance under another torch -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [pytest.param("2.10.0+cu128", marks=pytest.mark.proof), "2.16.0a0+git123"])
@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_training_goes_on_with_plain_inductor(version: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small()
    expected = gradients(model, model, x)
    monkeypatch.setattr(torch, "__version__", version)
    options = {"memory_budget": "min", "compiler": compiler}
    said = rf"not {re.escape(version)} \((upgrade|install) .*\): plain Inductor compiles this graph"
    with pytest.warns(PlannerWarning, match=said):
        actual = gradients(model, torch.compile(model, backend=remat, options=options), x)
    torch.testing.assert_close(actual, expected)
    assert compile_remat.reports() == []


def test_partition_hands_over_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(graph: torch.fx.GraphModule, inputs: object) -> object:
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(torch, "__version__", "2.16.0")
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.warns(PlannerWarning, match="torch's own partition"):
        call = aot_function(
            lambda x: torch.sin(x @ x), fw_compiler=run, bw_compiler=run, partition_fn=compile_remat.partition
        )
        (gradient,) = torch.autograd.grad(call(x).sum(), x)
    (expected,) = torch.autograd.grad(torch.sin(x @ x).sum(), x)
    torch.testing.assert_close(gradient, expected)
    assert compile_remat.reports() == []


def test_nothing_is_explained_or_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    model, x = small()
    for ask in (compile_remat.explain, compile_remat.plan, compile_remat.pareto):
        said = r"supports torch 2\.11 to 2\.15, not 2\.16\.0 \(upgrade .*\): install a supported torch"
        with pytest.raises(RematError, match=said):
            ask(model, x)
    with pytest.warns(PlannerWarning, match="Inductor is left as it is"):
        compile_remat.install(memory_budget="min")
    assert torch._inductor.config.custom_partitioner_fn is None


def test_the_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem_of_torch() -> str:
        return next(finding for finding in doctor.versions() if finding.what == "torch").problem

    assert problem_of_torch() == ""
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    assert "not 2.16.0" in problem_of_torch()


# -- a torch that has renamed what we import --------------------------------------------------------------------------

HIDDEN = {
    "torch._functorch.partitioners": ["_extract_fwd_bwd_modules", "fx_graph_cse"],
    "torch._inductor.choices": ["InductorChoices"],
    "torch._inductor.custom_graph_pass": ["CustomPartitionerFn"],
    "torch._inductor.virtualized": ["V"],
    "torch.fx._lazy_graph_module": ["_make_graph_module"],
    "torch.fx.experimental.proxy_tensor": ["is_sym_node"],
    "torch.fx.experimental.symbolic_shapes": ["optimization_hint", "size_hint"],
}
IMPORT = f"""
hidden = []
for name, words in {HIDDEN!r}.items():
    module = importlib.import_module(name)
    hidden += [(module, word, vars(module).pop(word)) for word in words if word in vars(module)]
assert len(hidden) >= 8, hidden
import compile_remat.backend
for module, word, value in hidden:
    setattr(module, word, value)
"""
TRAIN = f"""
def train(backend):
    torch.compiler.reset()
    x = torch.ones(8, 8, requires_grad=True)
    torch.compile(lambda x: torch.tanh(x @ x).sin(), backend=backend)(x).sum().backward()
    return x.grad

expected = train("inductor")  # imports all that torch itself needs of these names
torch.__version__ = "2.16.0a0+git123"
{IMPORT}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    actual = train(compile_remat.backend.remat)
assert torch.equal(actual, expected), (actual, expected)
print([w.category.__name__ for w in caught if "supports torch" in str(w.message)])
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    program = f"import importlib, warnings\nimport torch, torch._inductor.compile_fx\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)


def test_an_unknown_torch_may_lack_all_that_we_import() -> None:
    done = run(TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['PlannerWarning']\n"


def test_a_supported_torch_may_not() -> None:
    done = run(IMPORT)
    assert done.returncode == 1
    assert f"ImportError: torch {torch.__version__} has no " in done.stderr


def test_names_by_which_versions_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_name("math", "no_such_name", "tau", "pi") == 6.283185307179586
    assert private_module("math").pi == 3.141592653589793
    with pytest.raises(ImportError, match="no a or b in math"):
        private_name("math", "a", "b")
    with pytest.raises(ImportError, match="no_such_module"):
        private_module("no_such_module")
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    assert private_name("math", "a", "b") is private_module("no_such_module") is MissingName
