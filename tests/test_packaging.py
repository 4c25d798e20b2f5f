"""The folders hold the files that pyproject.toml declares, and the package exports the names that we mean to export."""

import re
import shutil
import subprocess
import sys
import tomllib
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compile_remat
from compile_remat import errors
from compile_remat._util.user_pass import UserPass
from compile_remat.runtime.peak_monitor import PeakMonitor

ROOT = Path(__file__).resolve().parent.parent
PREFIXES = {
    "compile_remat": "compile_remat",
    "passes": "compile_remat.passes",
    "cost_models": "compile_remat.cost_models",
}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_wheel_holds_the_modules_and_their_data_and_building_leaves_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for top in PREFIXES:
        shutil.copytree(ROOT / top, tree / top, ignore=shutil.ignore_patterns("__pycache__"))
    before = _files(tree)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    assert _files(tree) == before
    (wheel,) = (tmp_path / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = {top: prefix.replace(".", "/") for top, prefix in PREFIXES.items()}
    modules = [name.split("/", 1) for name in before if "/" in name]
    assert held == {f"{folders[top]}/{rest}" for top, rest in modules}
    data = ("py.typed", "cost_models/device/devices.json", "pages/page.html.jinja", "pages/page.js")
    assert {f"compile_remat/{name}" for name in data} <= held


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_one_version_everywhere(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None and newest[1] == version


def test_every_issue_form_asks_for_the_doctors_output() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert [form.stem for form in forms] == ["bug", "memory"]
    assert all("label: Output of `compile-remat doctor`" in form.read_text(encoding="utf-8") for form in forms)


def test_workflows_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    workflows = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    assert workflows.keys() == {"ci", "nightly", "release"}
    for name, text in workflows.items():
        made = {word for line in re.findall(r"make ([a-z -]+[a-z])", text) for word in line.split()}
        assert made and made <= targets, name


def test_the_nightly_copy_takes_any_torch() -> None:
    """The expression with which `make test-nightly` lifts the range."""
    lifted = subprocess.run(
        ["sed", "-E", r"s/^(SUPPORTED = .*), \([0-9]+, [0-9]+\)\)$/\1, (99, 0))/", "compile_remat/_torch/version.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert r"s/^(SUPPORTED = .*), \([0-9]+, [0-9]+\)\)$$/\1, (99, 0))/" in (ROOT / "Makefile").read_text()
    assert "\nSUPPORTED = ((2, 11), (99, 0))\n" in lifted


def test_public_names() -> None:
    assert compile_remat.__all__ == sorted(compile_remat.__all__)
    for name in compile_remat.__all__:
        assert getattr(compile_remat, name).__module__.startswith("compile_remat.")


def test_what_users_catch_and_annotate_is_public() -> None:
    """Our errors and warnings; and what the public functions take and give, with the fields of that: not what only draws."""
    public = {getattr(compile_remat, name) for name in compile_remat.__all__}
    raised = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception | Warning)
    }
    assert raised <= public, sorted(kind.__name__ for kind in raised - public)
    named = {kind for thing in public for kind in _classes_in(thing)}
    ours = {kind for kind in named if kind.__module__.startswith("compile_remat.")}
    drawing = {kind for kind in ours if kind.__module__.startswith("compile_remat.pages.")}
    settings = {kind for kind in ours if kind.__module__ == "compile_remat.budget"}  # of `RematConfig`, given as text
    settings.add(UserPass)  # given as a callable
    hooks = {PeakMonitor}  # a field of `MeasuredStep` for its own use
    missing = ours - drawing - settings - hooks - public
    assert not missing, sorted(kind.__name__ for kind in missing)


def _classes_in(thing: Any) -> Iterator[type]:
    """The classes in the annotations of a function or of a class's fields."""
    todo = list(typing.get_type_hints(thing, vars(sys.modules[thing.__module__]), vars(typing)).values())
    while todo:
        hint = todo.pop()
        todo.extend(typing.get_args(hint))
        if isinstance(hint, type):
            yield hint


def test_front_is_short() -> None:
    assert len((ROOT / "compile_remat" / "__init__.py").read_text(encoding="utf-8").splitlines()) <= 32


def test_entry_points_name_real_files(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    targets = [*project["scripts"].values(), *project["entry-points"]["torch_dynamo_backends"].values()]
    assert targets == ["compile_remat.cli:main", "compile_remat.entry_point:remat"]
    for target in targets:
        module, name = target.split(":")
        place = ROOT / module.replace(".", "/")
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        source = file.read_text(encoding="utf-8")
        assert re.search(rf"^(def {name}\(|{name}\b.* = )", source, re.MULTILINE), target


def test_pins_lie_in_the_declared_ranges(pyproject: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    extras = [need for needs in pyproject["project"]["optional-dependencies"].values() for need in needs]
    for need in [*pyproject["project"]["dependencies"], *extras]:
        if need.startswith("compile-remat["):
            continue
        name, floor = re.match(r"([\w-]+)>=([\d.]+)", need).groups()  # type: ignore[union-attr]
        assert _release(pins[name]) >= _release(floor), need


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_scipy_is_loaded_by_what_solves() -> None:
    """scipy takes longer to load than the whole package, and a process that finds its graphs in torch's caches solves nothing."""
    program = (
        "import sys, compile_remat.backend; print([n for n in ('scipy.sparse', 'scipy.optimize') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
