"""`compile-remat doctor`: prints versions, missing parts, and the settings in force."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from compile_remat._util.host import host_free_bytes
from compile_remat._util.text_table import print_table
from compile_remat._util.units import format_bytes

_PACKAGES = ("compile-remat", "torch", "scipy", "numpy")
_OPTIONAL = {
    "rich": "colours",
    "matplotlib": "pictures",
    "transformers": "models such as llama-2-7b of compile-remat plan",
    "triton": "exact bytes of a GPU that is not here",
}
"""Packages that some features need, and these features."""
_ENTRY_POINT_GROUP = "torch_dynamo_backends"
_ACCELERATE = "ACCELERATE_DYNAMO_BACKEND"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; `problem` says what to do if a needed part is missing, and is empty otherwise."""

    what: str
    value: str
    problem: str = ""


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print all findings; returns exit status 1 if a needed part is missing."""
    found = [*versions(), entry_point(), *accelerate(os.environ), cuda(), host(), cpp_compiler()]
    _print_findings(found)
    print("\nsettings in force (an option of torch.compile beats these)")
    _print_findings(settings(os.environ))
    problems = [finding for finding in found if finding.problem]
    if problems:
        print()
    for finding in problems:
        print(f"PROBLEM {finding.what}: {finding.problem}")
    return int(bool(problems))


def versions() -> Iterator[Finding]:
    """Yields the versions of Python and of this package's dependencies; a missing optional package is no problem."""
    from compile_remat._torch.version import version_problem

    yield Finding("python", platform.python_version())
    for name in (*_PACKAGES, *_OPTIONAL):
        try:
            found = importlib.metadata.version(name)
            yield Finding(name, found, version_problem() if name == "torch" else "")
        except importlib.metadata.PackageNotFoundError:
            if name in _OPTIONAL:
                yield Finding(name, f"not installed (optional: {_OPTIONAL[name]})")
            else:
                yield Finding(name, "not installed", "not installed: pip install compile-remat installs what it needs")


def entry_point() -> Finding:
    """Returns the registration of torch.compile(backend="remat"); a problem unless exactly one package registers the name."""
    found = importlib.metadata.entry_points(group=_ENTRY_POINT_GROUP, name="remat")
    targets = sorted({each.value for each in found})
    what = 'backend "remat"'
    if not targets:
        return Finding(what, "not registered", "only an installed package has a backend name: pip install .")
    if len(targets) > 1:
        return Finding(what, " and ".join(targets), "two packages register this name: uninstall one")
    return Finding(what, f"registered as {targets[0]}")


def accelerate(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields the way to use the backend under Accelerate and the Trainer, whose fixed list of backends lacks its name."""
    try:
        found = importlib.metadata.version("accelerate")
    except importlib.metadata.PackageNotFoundError:
        return
    way = 'model.compile(backend="remat", options=...) before the Trainer or Accelerator.prepare'
    problem = f"it knows no backend of this name, and raises a ValueError: unset {_ACCELERATE}, and call {way}"
    yield Finding("accelerate", f"{found}; {way}", problem if environ.get(_ACCELERATE, "").lower() == "remat" else "")


def cuda() -> Finding:
    """Returns the CUDA devices that torch sees; their absence is no problem."""
    import torch

    if not torch.cuda.is_available():
        return Finding("cuda", "none")
    return Finding("cuda", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())))


def host(nodes: Path = Path("/sys/devices/system/node")) -> Finding:
    """Returns the memory that offload may use: free bytes, the limit of locked memory, and the number of NUMA nodes."""
    free_bytes = host_free_bytes()
    parts = ["free memory not reported by the system" if free_bytes is None else f"{format_bytes(free_bytes)} free"]
    if sys.platform != "win32":
        import resource

        most_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if most_bytes == resource.RLIM_INFINITY else format_bytes(most_bytes)
        parts.append(f"locked memory (ulimit -l) {limit}")
    number = len(list(nodes.glob("node[0-9]*")))
    return Finding("host memory", ", ".join([*parts, *([f"{number} NUMA node{'s' * (number > 1)}"] if number else [])]))


def cpp_compiler() -> Finding:
    """Returns the C++ compiler for Inductor: `CXX`, else g++ or clang++; a problem if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for name in candidates:
        path = shutil.which(name)
        if path:
            return Finding("C++ compiler", path)
    problem = "Inductor builds CPU kernels with it: install g++, or set CXX"
    return Finding("C++ compiler", f"none ({' and '.join(candidates)} not found)", problem)


def settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields each setting with its value and its origin."""
    from compile_remat.config import ENV_PREFIX, RematConfig

    config = RematConfig.resolve(environ=environ)
    for row in fields(RematConfig):
        variable = ENV_PREFIX + row.name.upper()
        origin = f"environment, {variable}" if environ.get(variable, "").strip() else "default"
        value = getattr(config, row.name)
        shown = {"instances": "learn"}.get(row.name, "none") if value is None else value
        yield Finding(row.name, f"{shown}  ({origin})")


def _print_findings(findings: Iterable[Finding]) -> None:
    print_table("", ("", ""), [(each.what, each.value) for each in findings], align="ll")
